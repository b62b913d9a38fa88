"""Keys do what the controls do, say so in a list, and leave whoever writes alone."""

from __future__ import annotations

from playwright.sync_api import expect

from session_server.local_server import LocalServer
from tests.browser.axe import serious
from tests.browser.chat import LONG, Chat
from tests.browser.conftest import OpenTab


def test_keys_do_what_controls_do(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    keyboard = chat.page.keyboard
    chat.say("Say one")
    chat.message.fill("njks?/")
    expect(chat.message).to_have_value("njks?/")
    chat.message.fill("")
    keyboard.press("Escape")
    expect(chat.message).not_to_be_focused()
    keyboard.press("n")
    expect(chat.message).to_be_focused()
    assert chat.texts() == []
    chat.say("Say two")
    keyboard.press("Escape")
    keyboard.press("j")
    expect(chat.text).to_have_text("one")
    keyboard.press("k")
    expect(chat.text).to_have_text("two")
    keyboard.press("/")
    expect(chat.message).to_be_focused()
    expect(chat.message).to_have_value("")
    keyboard.press("ControlOrMeta+Shift+O")
    assert chat.texts() == []


def test_escape_stops_the_answer(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    with chat.answering():
        chat.send(LONG)
        expect(chat.text).to_contain_text("word3")
        chat.message.focus()
        chat.page.keyboard.press("Escape")
    assert chat.hear("turn.cancelled")["kept_partial"]


def test_the_list_names_the_keys_and_turns_single_ones_off(open_tab: OpenTab, axe: str) -> None:
    page = open_tab().page
    page.get_by_role("region", name="Messages").focus()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Shortcuts")
    expect(dialog.get_by_text("New conversation").first).to_be_visible()
    assert not serious(page, axe)
    dialog.get_by_role("checkbox").uncheck()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.get_by_role("region", name="Messages").focus()
    page.keyboard.press("?")
    page.keyboard.press("s")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name="Shortcuts").click()
    expect(dialog.get_by_role("checkbox")).not_to_be_checked()
