"""A quota that is full: the page says when the same can succeed, and asks again when told to."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import expect

from session_server.local_server import LocalServer
from tests.browser.axe import serious
from tests.browser.chat import Chat
from tests.browser.conftest import FLAGS, OpenTab

TURNS_PER_MIN = 12
WAIT_S = 60 // TURNS_PER_MIN
"""Between two turns, once the minute's worth is used up."""


@pytest.fixture(scope="module")
def limited() -> Iterator[LocalServer]:
    """A server that takes so many turns of anybody."""
    with LocalServer([*FLAGS, "--tenant-limits", f"turns_per_min={TURNS_PER_MIN}"]) as running:
        yield running


def use_up(server: LocalServer) -> None:
    """Ask until a turn was taken just now and the next has to wait as long as any."""
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as http:
        path = f"/v1/sessions/{http.post('/v1/sessions', json={}).json()['id']}/turns"
        body = {"input": "Hi", "generate": False}
        while http.post(path, json=body).headers.get("retry-after") != str(WAIT_S):
            pass


def test_a_refusal_counts_down_and_the_same_is_sent_again(
    open_tab: OpenTab, limited: LocalServer, axe: str
) -> None:
    chat = Chat(open_tab(url=limited.url))
    chat.say("My name is Ada.")
    use_up(limited)
    chat.send("What is my name?")
    again = chat.page.get_by_role("button", name=re.compile("^Send again"))
    expect(again).to_have_text(re.compile(rf"^Send again in [1-{WAIT_S}] s$"))
    expect(chat.page.get_by_role("alert")).to_contain_text("turns per minute are used up")
    assert not serious(chat.page, axe)
    expect(again).to_have_text("Send again")
    with chat.answering():
        again.click()
    assert chat.answer() == "Your name is Ada."
    use_up(limited)
    chat.send("What is my name?")
    with chat.answering():
        again.click()
        expect(again).to_have_text(re.compile("by itself$"))
    assert chat.texts()[2:] == 2 * ["What is my name?", "Your name is Ada."]


LEAVE_AT_ONCE = """() => {
  document.querySelector('#composer').requestSubmit();
  document.querySelector('#new-chat').click();
}"""


def test_a_conversation_that_was_left_leaves_its_socket_when_its_turn_is_refused(
    open_tab: OpenTab, limited: LocalServer
) -> None:
    chat = Chat(open_tab(url=limited.url))
    use_up(limited)
    with httpx.Client(base_url=limited.url, trust_env=False) as http:
        refused = re.compile(r'^session_server_refusals_total\{code="quota_exceeded"\} (\d+)', re.M)

        def num_refused() -> int:
            return int(refused.findall(http.get("/metrics").text)[0])

        before = num_refused()
        for number in range(3):
            chat.message.fill(f"Say {number}.")
            chat.page.evaluate(LEAVE_AT_ONCE)
        chat.until(lambda: num_refused() == before + 3)
        left = 'session_server_connections{kind="websocket"} 0.0'
        chat.until(lambda: left in http.get("/metrics").text)
