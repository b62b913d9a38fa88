"""What the browser keeps, and what the server: no storage, two tabs, sessions begun elsewhere."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.sync_api import Route, expect

from session_server.local_server import LocalServer
from tests.browser.axe import serious
from tests.browser.chat import Chat
from tests.browser.conftest import OpenTab
from tests.browser.line import Line

BLOCKED = """for (const name of ['localStorage', 'sessionStorage'])
  Object.defineProperty(window, name, {
    get() { throw new DOMException('Access is denied for this document.', 'SecurityError'); },
  });"""


def test_where_nothing_is_kept_the_page_says_so_and_works_until_it_is_closed(
    open_tab: OpenTab, parrot: LocalServer
) -> None:
    tab = open_tab("/docs", url=parrot.url)
    tab.page.add_init_script(BLOCKED)
    tab.page.goto(parrot.url)
    chat = Chat(tab)
    word = chat.page.get_by_text("This browser keeps nothing for this page")
    expect(word).to_be_visible()
    chat.button("Light or dark").click()
    assert chat.say("Say one.") == "one."
    chat.button("New conversation").click()
    expect(chat.articles).to_have_count(0)
    expect(word).to_have_count(0)
    chat.button("Say one.").click()
    expect(chat.articles).to_have_count(2)
    chat.page.goto(f"{parrot.url}/dashboard")
    expect(chat.page.get_by_role("status").get_by_text("Up")).to_be_visible()


def test_a_tab_at_rest_takes_what_another_has_said_and_writes_over_none_of_it(
    open_tab: OpenTab, parrot: LocalServer, parrot_http: httpx.Client
) -> None:
    first = Chat(open_tab(url=parrot.url))
    first.say("Say one.")
    second = Chat(open_tab(first.hash, url=parrot.url, beside=first.tab))
    expect(second.articles).to_have_count(2)
    parrot_http.delete(f"/v1/sessions/{first.session_id}").raise_for_status()
    for chat in (first, second):
        chat.witness.allow("404")
        expect(chat.connection).to_have_text(re.compile("at rest|elsewhere"))
    expect(second.page.get_by_text("This session was closed on the server.")).to_be_visible()
    # No pause in the typing: after one it is kept and computed, which has it leave its rest.
    second.page.evaluate("window.setTimeout = () => 0")
    second.message.fill("Half typed")
    assert first.say("Say two.") == "two."
    expect(second.articles).to_have_count(4)
    expect(second.message).to_have_value("Half typed")
    second.page.goto("about:blank")
    third = Chat(open_tab(first.hash, url=parrot.url, beside=first.tab))
    expect(third.articles).to_have_count(4)
    expect(third.message).to_have_value("Half typed")
    third.button("Delete “Say one.”").click()
    third.button("Delete", third.page.locator("#notices")).click()
    expect(first.page.get_by_text("This conversation was deleted in another tab.")).to_be_visible()
    first.page.reload()
    expect(first.page.get_by_text("Nothing said yet.")).to_be_visible()


def test_what_is_sent_in_two_tabs_without_a_server_is_answered_in_a_third(
    open_tab: OpenTab, parrot: LocalServer
) -> None:
    with Line(parrot.url) as line:
        first = Chat(open_tab(url=line.url))
        first.say("Say one.")
        second = Chat(open_tab(first.hash, url=line.url, beside=first.tab))
        expect(second.articles).to_have_count(2)
        for chat in (first, second):
            chat.witness.allow("WebSocket connection|ERR_")
        line.cut()
        expect(second.connection).to_contain_text("reconnecting")
        place = first.hash
        second.send("Say of the second.")
        first.send("Say of the first.")
        for chat in (first, second):
            chat.page.goto("about:blank")
        line.mend()
        third = Chat(open_tab(place, url=line.url, beside=first.tab))
        expect(third.answers).to_have_count(3)
        third.rest()
        assert sorted(third.texts()[3::2]) == ["of the first.", "of the second."]


def test_sessions_that_were_begun_elsewhere_are_found_and_gone_on_with(
    open_tab: OpenTab, server: LocalServer, http: httpx.Client, axe: str
) -> None:
    for name in ("begun-elsewhere", "begun-too"):
        http.post("/v1/sessions", json={"id": name}).raise_for_status()
    body = {"input": "My name is Ada.", "sampling": {"temperature": 0}}
    http.post("/v1/sessions/begun-elsewhere/turns", json=body).raise_for_status()
    chat = Chat(open_tab())
    chat.say("The garage code is 482.")
    group = chat.page.locator("details", has_text="On the server")
    group.locator("summary").click()
    expect(group.get_by_role("button", name="begun-too")).to_be_visible()
    expect(group.get_by_role("button", name=chat.session_id)).to_have_count(0)
    assert not serious(chat.page, axe)
    group.get_by_role("button", name="begun-elsewhere").click()
    expect(chat.articles).to_have_count(2)
    expect(group.get_by_role("button", name="begun-elsewhere")).to_have_count(0)
    assert chat.say("What is my name?") == "Your name is Ada."
    for _ in range(2):  # closed and opened again
        group.locator("summary").click()
    expect(group.get_by_role("button", name="begun-too")).to_be_visible()
    expect(group.get_by_role("button", name="begun-elsewhere")).to_have_count(0)


def test_more_sessions_than_a_page_has_come_page_by_page(open_tab: OpenTab) -> None:
    tab = open_tab("/docs")
    pages = {None: ("a", "b"), "b": ("c", "d")}

    def answer(route: Route) -> None:
        after = parse_qs(urlsplit(route.request.url).query).get("after", [None])[0]
        names = pages[after]
        data = [session(name) for name in names]
        last = None if after else names[-1]
        route.fulfill(json={"object": "list", "data": data, "next_after": last})

    tab.page.route("**/v1/sessions?*", answer)
    tab.page.goto(tab.witness.origin)
    chat = Chat(tab)
    group = chat.page.locator("details", has_text="On the server")
    group.locator("summary").click()
    names = group.locator(".chat-title")
    expect(names).to_have_text([re.compile("^b1 turn, 1,200 tokens"), re.compile("^a")])
    chat.button("More").click()
    expect(names).to_have_text([re.compile(f"^{name}") for name in "badc"])
    expect(chat.button("More")).to_have_count(0)


def session(name: str) -> dict[str, object]:
    """A session as it is listed."""
    return {"id": name, "state": "cold", "tokens": 1200, "turns": 1, "created": 1.8e9}


@pytest.mark.parametrize(
    "name", ["", "%E0%A4%A", "a/../b", "..%2Fsessions%2Freal", "..", "<b>&%3Cimg%3E"]
)
def test_a_link_to_no_session_starts_the_page_and_asks_for_nothing_else(
    open_tab: OpenTab, server: LocalServer, name: str
) -> None:
    tab = open_tab("/docs")
    tab.witness.allow("404|WebSocket connection")
    tab.page.goto(f"{server.url}/#session={name}")
    chat = Chat(tab)
    assert chat.say("My name is Ada.") == "Noted. Your name is Ada."
    paths = {urlsplit(each.url).path for each in tab.witness.requests}
    assert not {path for path in paths if path.startswith("/v1/sessions/")}
    assert len(tab.witness.sockets) == 1


def test_a_broken_storage_starts_the_page(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.say("Say one.")
    chat.page.goto(f"{parrot.url}/docs")
    chat.page.evaluate("""() => {
      for (const [name, text] of [
        ['chat.x', '{'], ['chat.y', '{"keys": ["none"], "turns": [7]}'], ['chat.z', '[]'],
        ['settings', '{"a'], ['theme', '<'], ['keys-off', ''], ['item.x', 'x'],
      ]) localStorage.setItem(`session-server.${name}`, text);
      sessionStorage.setItem('session-server.shown', 'x');
    }""")
    chat.page.goto(parrot.url)
    chat.button("Say one.").click()
    expect(chat.articles).to_have_count(2)
    assert chat.say("Say two.") == "two."
