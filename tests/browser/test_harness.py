"""What the other tests rely on: that trouble in a tab is seen, and axe-core finds what is wrong."""

from __future__ import annotations

import pytest
from playwright.sync_api import Error, expect

from session_server.local_server import LocalServer
from tests.browser.axe import serious
from tests.browser.conftest import OpenTab
from tests.browser.frames import at, scroll_up
from tests.browser.line import Line


def test_a_script_against_the_policy_is_seen(open_tab: OpenTab) -> None:
    tab = open_tab("/docs")
    tab.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'hit = 1'}))"
    )
    assert tab.page.evaluate("typeof hit") == "undefined"
    assert any("script-src" in trouble for trouble in tab.witness.troubles)
    tab.witness.allow("script-src|inline script")


def test_a_request_that_leaves_the_origin_is_seen(open_tab: OpenTab) -> None:
    tab = open_tab("/docs")
    tab.page.evaluate("fetch('http://127.0.0.1:9/gone').catch(() => {})")
    tab.page.evaluate(
        "document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/'}))"
    )
    assert any("connect-src" in trouble for trouble in tab.witness.troubles)
    assert any("img-src" in trouble for trouble in tab.witness.troubles)
    tab.witness.allow("connect-src|img-src|127.0.0.1:9")


def test_an_error_that_nobody_catches_is_seen(open_tab: OpenTab) -> None:
    tab = open_tab("/docs")
    with tab.page.expect_event("pageerror"):
        tab.page.evaluate("void Promise.reject(new Error('lost'))")
    assert any("lost" in trouble for trouble in tab.witness.troubles)
    tab.witness.allow("lost")


def test_axe_finds_what_is_wrong(open_tab: OpenTab, axe: str) -> None:
    page = open_tab("/docs").page
    assert not serious(page, axe)
    page.evaluate("document.body.append(document.createElement('button'))")
    assert any("button-name" in found for found in serious(page, axe))


def test_a_line_is_cut_and_mended(open_tab: OpenTab, server: LocalServer) -> None:
    with Line(server.url) as line:
        tab = open_tab("/docs", url=line.url)
        line.cut()
        with pytest.raises(Error, match="ERR_"):
            tab.page.reload()
        tab.page.wait_for_url("chrome-error://**")
        line.mend()
        tab.page.goto(f"{line.url}/docs")
        expect(tab.page.locator("h1")).to_contain_text("session-server")
        tab.witness.allow("ERR_|chrome-error")


def test_the_work_of_a_frame_is_measured(open_tab: OpenTab) -> None:
    page = open_tab("/docs").page
    page.evaluate("""() => {
      const long = document.body.appendChild(document.createElement('pre'));
      long.textContent = 'line\\n'.repeat(3000);
      document.documentElement.scrollTop = 1e9;
    }""")
    calm = scroll_up(page, "html", pixels=500)
    page.evaluate("""() => {
      document.documentElement.scrollTop = 1e9;
      addEventListener('scroll', () => {
        const end = performance.now() + 30;
        while (performance.now() < end) { /* at work */ }
      });
    }""")
    busy = scroll_up(page, "html", pixels=500)
    # Of the 30 ms of each frame a loaded machine gives the page a part.
    assert 5 * at(calm.work_ms, 0.5) < at(busy.work_ms, 0.5), (str(calm), str(busy))
