"""A narrow window has all that a wide one has, for fingers."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from session_server.local_server import LocalServer
from tests.browser.chat import RICH, Chat
from tests.browser.conftest import OpenTab

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTROLS = "button, a, input, textarea, select, summary"
SMALL_TARGETS = """(controls) => [...document.querySelectorAll(controls)]
  .filter((node) => node.checkVisibility({visibilityProperty: true, opacityProperty: true}))
  .filter((node) => !node.closest('.text, .skip'))
  .map((node) => [node, node.getBoundingClientRect()])
  .filter(([node, box]) => box.width && box.height && (box.height < 44 || box.width < 44))
  .map(([node, box]) => `${node.outerHTML.slice(0, 120)} ${box.width} x ${box.height}`)"""


@pytest.mark.parametrize("width", [360, 390, 640])
def test_a_narrow_window_has_it_all(open_tab: OpenTab, parrot: LocalServer, width: int) -> None:
    viewport = {"width": width, "height": 740}
    chat = Chat(open_tab(url=parrot.url, viewport=viewport, has_touch=True, is_mobile=True))
    chat.say(f"Say {RICH}")
    chat.say("Say " + "verylongword" * 30)
    assert chat.page.evaluate(OVERFLOW) == 0
    assert not chat.page.evaluate(SMALL_TARGETS, CONTROLS)
    first = chat.articles.first
    chat.button("Edit this message", first).tap()
    expect(first.get_by_role("textbox")).to_be_in_viewport()
    chat.page.keyboard.press("Enter")
    expect(first.get_by_role("textbox")).to_have_value(f"Say {RICH}\n")
    expect(first.get_by_text("Enter sends")).to_have_count(0)
    chat.button("Cancel", first).tap()
    chat.button("Conversations").tap()
    expect(chat.button("New conversation")).to_be_visible()
    chat.button("New conversation").tap()
    expect(chat.articles).to_have_count(0)
