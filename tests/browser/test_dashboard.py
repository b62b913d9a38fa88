"""The dashboard says what the server says, live, and does what it is told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from session_server.core.events import ACCOUNTS
from session_server.local_server import LocalServer
from tests.browser.axe import serious
from tests.browser.chat import Chat
from tests.browser.conftest import FLAGS, LOOKS, OpenTab

TOLD = "My name is Ada."


@pytest.fixture
def session_id(http: httpx.Client) -> str:
    """A session with a turn behind it, the only one with its name."""
    made = http.post("/v1/sessions", json={}).json()["id"]
    http.post(f"/v1/sessions/{made}/turns", json={"input": TOLD}).raise_for_status()
    return str(made)


def number(text: str) -> int:
    """The digits of a number as people write it."""
    return int(re.sub(r"\D", "", text))


def shown(page: Page) -> dict[str, int]:
    """Pages by account, as the legend of the pool says."""
    texts = "(all) => all.map((each) => [each.dataset.account, each.children[2].textContent])"
    return {name: number(text) for name, text in page.locator("[data-account]").evaluate_all(texts)}


def test_its_numbers_are_those_of_the_server(
    open_tab: OpenTab, http: httpx.Client, session_id: str
) -> None:
    page = open_tab("/dashboard").page
    expect(page.get_by_role("status").get_by_text("Up")).to_be_visible()
    memory: dict[str, Any] = http.get("/v1/admin/memory").json()
    pool = memory["pools"]["full"]
    assert pool["active"] == 0, "nothing runs"
    free = page.locator("[data-account=free]")
    expect(free).to_contain_text(f"{pool['free']:,}")
    assert shown(page) == {account: pool[account] for account in ACCOUNTS}
    rows = f"{memory['rows'] - memory['rows_free']:,} of {memory['rows']:,} rows held"
    expect(page.get_by_text(rows)).to_be_visible()
    page.get_by_role("searchbox", name="Find sessions").fill(session_id)
    row = page.get_by_role("row").filter(has_text=session_id)
    told = http.get(f"/v1/sessions/{session_id}").json()
    cells = row.get_by_role("cell").all_inner_texts()
    assert [number(cells[1]), number(cells[3])] == [told["tokens"], told["turns"]]
    assert cells[0] == told["state"]


def test_a_turn_is_seen_while_it_runs(
    open_tab: OpenTab, http: httpx.Client, session_id: str
) -> None:
    page = open_tab("/dashboard").page
    page.get_by_role("searchbox", name="Find sessions").fill(session_id)
    row = page.get_by_role("row").filter(has_text=session_id)
    expect(row).to_contain_text("resident")
    body = {"input": TOLD, "sampling": {"ignore_eos": True, "max_tokens": 3900}}
    path = f"/v1/sessions/{session_id}/turns"
    with http.stream("POST", path, json=body, headers={"accept": "text/event-stream"}):
        expect(row).to_contain_text("running")
        columns = page.get_by_role("list", name="What it computed")
        expect(columns).to_contain_text("output 1")
        expect(columns.get_by_role("button")).not_to_have_count(0)
    expect(row).to_contain_text("resident")


def test_a_session_is_closed_only_when_asked_twice(
    open_tab: OpenTab, http: httpx.Client, session_id: str
) -> None:
    page = open_tab("/dashboard").page
    page.get_by_role("searchbox", name="Find sessions").fill(session_id)
    page.get_by_role("button", name=f"Actions for {session_id}").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Close", exact=True).click()
    assert http.get(f"/v1/sessions/{session_id}").status_code == 200
    dialog.get_by_role("button", name=f"Close {session_id[:24]}").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_text("No session matches.")).to_be_visible()
    assert http.get(f"/v1/sessions/{session_id}").status_code == 404


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_serious(open_tab: OpenTab, session_id: str, axe: str, look: str) -> None:
    page = open_tab("/dashboard", **LOOKS[look]).page
    page.get_by_role("searchbox", name="Find sessions").fill(session_id)
    expect(page.get_by_role("row").filter(has_text=session_id)).to_be_visible()
    assert not serious(page, axe)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
    page.get_by_role("button", name=f"Actions for {session_id}").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert not serious(page, axe)


def test_the_chat_links_here_only_where_it_is_served(open_tab: OpenTab) -> None:
    lines: list[str] = []
    with LocalServer([*FLAGS, "--admin-port", "0"], on_line=lines.append) as server:
        (admin,) = (line.split()[-1] for line in lines if line.startswith("for operators: "))
        for url, is_here in ((server.url, False), (admin, True)):
            chat = Chat(open_tab(url=url))
            chat.say("My name is Ada.")
            expect(chat.page.get_by_role("link", name="Dashboard")).to_be_visible(visible=is_here)
            chat.page.close()


@pytest.fixture
def many(http: httpx.Client) -> Iterator[str]:
    """What the ids of three pages of sessions begin with."""
    names = [f"paged-{number:02}" for number in range(60)]
    for name in names:
        http.post("/v1/sessions", json={"id": name}).raise_for_status()
    yield "paged-"
    for name in names:
        http.delete(f"/v1/sessions/{name}")


def test_a_double_click_turns_one_page(open_tab: OpenTab, http: httpx.Client, many: str) -> None:
    page = open_tab("/dashboard").page
    page.get_by_role("button", name="Session", exact=True).click()
    page.get_by_role("searchbox", name="Find sessions").fill(many)
    rows = page.locator("tbody tr")
    expect(page.get_by_text("60 match")).to_be_visible()
    page.get_by_role("button", name="Next page").dblclick()
    expect(page.get_by_text("26 to 50", exact=True)).to_be_visible()
    expect(rows.first).to_contain_text(f"{many}25")
    page.get_by_role("button", name="Next page").click()
    expect(page.get_by_text("51 to 60", exact=True)).to_be_visible()
    expect(rows.first).to_contain_text(f"{many}50")
    for number in range(50, 60):
        http.delete(f"/v1/sessions/{many}{number}")
    # The page that is shown is gone: the last that there is comes in its place.
    expect(page.get_by_text("26 to 50", exact=True)).to_be_visible()
    page.get_by_role("button", name="Previous page").dblclick()
    expect(page.get_by_text("1 to 25", exact=True)).to_be_visible()


def test_a_double_click_forks_once(open_tab: OpenTab, http: httpx.Client, session_id: str) -> None:
    tab = open_tab("/dashboard")
    page = tab.page
    page.get_by_role("searchbox", name="Find sessions").fill(session_id)
    page.get_by_role("button", name=f"Actions for {session_id}").click()
    page.get_by_role("dialog").get_by_role("button", name="Fork", exact=True).dblclick()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert len([each for each in tab.witness.requests if each.url.endswith("/fork")]) == 1


def test_a_session_that_is_gone_leaves_the_table_when_somebody_acts_on_it(
    open_tab: OpenTab, http: httpx.Client, session_id: str
) -> None:
    tab = open_tab("/dashboard")
    tab.witness.allow("404")
    page = tab.page
    page.get_by_role("searchbox", name="Find sessions").fill(session_id)
    row = page.get_by_role("row").filter(has_text=session_id)
    expect(row).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    http.delete(f"/v1/sessions/{session_id}")
    page.get_by_role("button", name=f"Actions for {session_id}").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Fork", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("No such session")
    expect(row).to_have_count(0)
