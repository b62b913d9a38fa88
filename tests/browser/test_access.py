"""For everybody: axe-core, the keyboard alone, a phone, dark, without motion, at 200 %."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from session_server.local_server import LocalServer
from tests.browser.axe import serious
from tests.browser.chat import RICH, Chat
from tests.browser.conftest import LOOKS, OpenTab


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_serious_on_the_chat(
    open_tab: OpenTab, parrot: LocalServer, axe: str, look: str
) -> None:
    chat = Chat(open_tab(url=parrot.url, **LOOKS[look]))
    assert not serious(chat.page, axe)
    chat.say(f"Say {RICH}")
    chat.say("Say more.")
    assert not serious(chat.page, axe)
    chat.button("Settings").click()
    expect(chat.page.get_by_role("dialog")).to_be_visible()
    assert not serious(chat.page, axe)
    chat.page.keyboard.press("Escape")
    expect(chat.page.get_by_role("dialog")).to_have_count(0)


def focused(page: Page) -> str:
    """The name of what has the focus."""
    return str(
        page.evaluate(
            "() => document.activeElement.getAttribute('aria-label')"
            " ?? document.activeElement.innerText"
        )
    )


def test_the_link_to_the_message_leaves_the_conversation_in_sight(
    open_tab: OpenTab, parrot: LocalServer
) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.say("Say one.")
    place = chat.hash
    chat.page.evaluate("document.activeElement.blur()")
    chat.page.get_by_role("link", name="Skip to the message").focus()
    chat.page.keyboard.press("Enter")
    expect(chat.message).to_be_focused()
    expect(chat.page).to_have_url(chat.witness.origin + place)
    expect(chat.articles).to_have_count(2)


def tab_to(page: Page, name: str) -> None:
    """Press Tab until a control has the focus."""
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(focused(page))
        if seen[-1] == name:
            return
    raise AssertionError(f"{name} is not reached: {seen}")


def test_a_conversation_by_keyboard_alone(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    page = chat.page
    expect(chat.message).to_be_focused()
    page.keyboard.type("Say one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(chat.answers).to_have_count(1)
    chat.rest()
    assert chat.answer() == "one two"
    expect(chat.message).to_be_focused()
    tab_to(page, "Settings")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    for _ in range(40):
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body"
            " || document.activeElement.closest('dialog') !== null"
        ), "the focus left the dialog"
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert focused(page) == "Settings"


def test_the_end_of_an_answer_is_announced_once(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.page.evaluate("""() => {
      window.told = [];
      new MutationObserver(() => told.push(announcer.textContent))
        .observe(document.querySelector('#announcer'), {childList: true});
    }""")
    chat.say("Say one two three four five six seven eight nine ten.")
    told = [text for text in chat.page.evaluate("told") if "three" in text]
    assert len(told) == 1
    assert "ten." in told[0]


def test_nothing_moves_for_who_wants_no_motion(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url, reduced_motion="reduce"))
    chat.say("Say one.")
    chat.button("Settings").click()
    longest = """() => Math.max(0, ...document.getAnimations().map((each) =>
      each.effect.getComputedTiming().duration))"""
    assert chat.page.evaluate(longest) <= 1
