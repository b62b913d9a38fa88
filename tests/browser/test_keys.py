"""A server that asks for a key: the box, where the key is, where it never is, and its end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from session_server.local_server import LocalServer
from tests.browser.axe import serious
from tests.browser.chat import Chat
from tests.browser.conftest import FLAGS, OpenTab, Tab

STORES = "() => JSON.stringify([{...localStorage}, document.cookie, location.href, history.state])"
REFUSALS = "401|WebSocket connection"
REFRESHES_MS = 7000
"""As long as the dashboard takes to ask for its sessions twice."""


class Keys:
    """A file of keys, changed as an operator changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def do(self, *words: str) -> str:
        """Run `session-server keys`, and return what it says."""
        argv = (sys.executable, "-m", "session_server", "keys", *words, "--file", str(self.path))
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def add(self, name: str) -> str:
        """Make a key of this name."""
        return self.do("add", name).split()[-1]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """A file with one key, that nobody here knows."""
    made = Keys(tmp_path_factory.mktemp("keys") / "keys")
    made.add("nobody")
    return made


@pytest.fixture(scope="module")
def guarded(keys: Keys) -> Iterator[LocalServer]:
    """A server with that file."""
    with LocalServer([*FLAGS, "--api-key-file", str(keys.path)]) as running:
        yield running


def box_of(tab: Tab) -> Locator:
    """The dialog that asks for a key."""
    return tab.page.get_by_role("dialog", name="API key")


def enter(tab: Tab, key: str) -> None:
    """Type a key where it is asked for."""
    box_of(tab).get_by_label("Key", exact=True).fill(key)
    box_of(tab).get_by_role("button", name="Use this key").click()


@contextlib.contextmanager
def taken_soon(tab: Tab, key: str) -> Iterator[None]:
    """Enter a key that the server may not have read yet."""
    expect(box_of(tab)).to_be_visible()
    while box_of(tab).count():
        enter(tab, key)
        tab.page.wait_for_timeout(100)
    yield


def test_a_key_is_asked_for_used_and_forgotten(
    open_tab: OpenTab, guarded: LocalServer, keys: Keys, axe: str
) -> None:
    key = keys.add("ada")
    tab = open_tab(url=guarded.url)
    tab.witness.allow(REFUSALS)
    expect(box_of(tab).get_by_label("Key", exact=True)).to_be_focused()
    assert not serious(tab.page, axe)
    enter(tab, "with a space")
    expect(box_of(tab).get_by_role("alert")).to_contain_text("no spaces")
    enter(tab, "wrong")
    expect(box_of(tab).get_by_role("alert")).to_have_text("The server does not take this key.")
    with taken_soon(tab, key):
        chat = Chat(tab)
    assert "Ada" in chat.say("My name is Ada.")
    assert key not in tab.page.content()
    assert key not in tab.page.evaluate(STORES)
    assert not [request.url for request in tab.witness.requests if key in request.url]
    tab.page.reload()
    assert chat.say("What is my name?") == "Your name is Ada."
    other = open_tab(url=guarded.url, beside=tab)
    other.witness.allow(REFUSALS)
    expect(box_of(other)).to_be_visible()
    other.page.close()
    chat.button("API key").click()
    chat.button("Forget it").click()
    assert key not in tab.page.evaluate("JSON.stringify({...sessionStorage})")
    tab.page.reload()
    expect(box_of(tab)).to_be_visible()


def test_who_gives_no_key_can_type_and_is_asked_when_they_send(
    open_tab: OpenTab, guarded: LocalServer
) -> None:
    tab = open_tab(url=guarded.url)
    tab.witness.allow(REFUSALS)
    expect(box_of(tab)).to_be_visible()
    tab.page.keyboard.press("Escape")
    expect(box_of(tab)).to_have_count(0)
    chat = Chat(tab)
    for text in ("My name ", "is Ada. "):
        with tab.page.expect_response("**/v1/sessions"):
            chat.message.press_sequentially(text, delay=100)
    expect(box_of(tab)).to_have_count(0)
    chat.button("Send").click()
    expect(box_of(tab)).to_be_visible()
    enter(tab, "wrong")
    expect(box_of(tab).get_by_role("alert")).to_have_text("The server does not take this key.")
    chat.button("Close", box_of(tab)).click()
    with tab.page.expect_response("**/v1/sessions"):
        chat.message.press_sequentially("What ", delay=100)
    expect(box_of(tab)).to_have_count(0)
    chat.button("API key").click()
    expect(box_of(tab)).to_be_visible()


def test_a_key_that_is_revoked_ends_the_session_and_no_text(
    open_tab: OpenTab, guarded: LocalServer, keys: Keys
) -> None:
    key = keys.add("eve")
    tab = open_tab(url=guarded.url)
    tab.witness.allow(REFUSALS + "|404")
    with taken_soon(tab, key):
        chat = Chat(tab)
    chat.say("My name is Eve.")
    before = chat.texts()
    keys.do("revoke", "eve")
    expect(box_of(tab)).to_contain_text("does not take this key any more", timeout=15_000)
    expect(chat.connection).to_contain_text(re.compile("at rest|no access"))
    assert chat.texts() == before
    with taken_soon(tab, keys.add("eve")):
        pass
    chat.say("What is my name?")
    assert chat.texts() == [*before, "What is my name?", "Your name is Eve."]


def test_a_chat_goes_on_with_its_own_key_behind_a_look_at_the_dashboard(
    open_tab: OpenTab, guarded: LocalServer, keys: Keys
) -> None:
    tab = open_tab(url=guarded.url)
    tab.witness.allow(REFUSALS + "|403")
    with taken_soon(tab, keys.add("ada")):
        chat = Chat(tab)
    chat.say("My name is Ada.")
    tab.page.goto(f"{guarded.url}/dashboard")
    expect(tab.page.get_by_role("alert")).to_contain_text("may not see the sessions of others")
    tab.page.get_by_role("button", name="API key").click()
    with taken_soon(tab, keys.do("add", "operator", "admin=1").split()[-1]):
        expect(tab.page.get_by_role("status").get_by_text("Up")).to_be_visible()
    tab.page.reload()
    expect(tab.page.get_by_role("status").get_by_text("Up")).to_be_visible()
    tab.page.go_back()
    chat.say("What is my name?")
    assert chat.texts()[-1] == "Your name is Ada."
    keys.do("revoke", "operator")


def test_an_operator_whose_key_is_revoked_is_told_and_asked_once(
    open_tab: OpenTab, guarded: LocalServer, keys: Keys
) -> None:
    def operator() -> str:
        return keys.do("add", "operator", "admin=1").split()[-1]

    tab = open_tab("/dashboard", url=guarded.url)
    tab.witness.allow(REFUSALS)
    page = tab.page
    up = page.get_by_role("status").get_by_text("Up")
    with taken_soon(tab, operator()):
        expect(up).to_be_visible()
    keys.do("revoke", "operator")
    expect(box_of(tab)).to_contain_text("does not take this key any more", timeout=15_000)
    page.keyboard.press("Escape")
    expect(page.get_by_role("alert").get_by_text("What is shown is from before.")).to_be_visible()
    asked = len(tab.witness.requests)
    page.wait_for_timeout(REFRESHES_MS)
    assert len(tab.witness.requests) == asked, "nothing is asked with a key that was refused"
    expect(box_of(tab)).to_have_count(0)
    page.get_by_role("button", name="API key").click()
    with taken_soon(tab, operator()):
        expect(up).to_be_visible()
