"""Export and import as a person does them: files that are downloaded, chosen and dropped."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import FilePayload, Page, expect

from session_server.local_server import LocalServer
from tests.browser.axe import serious
from tests.browser.chat import Chat
from tests.browser.conftest import OpenTab

DROP = """async ([text]) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([text], 'dropped.json'));
  const options = {dataTransfer, bubbles: true, cancelable: true};
  const drag = (type) => document.body.dispatchEvent(new DragEvent(type, options));
  drag('dragenter');
  while (!document.documentElement.classList.contains('dropping')) {
    await new Promise((resolve) => setTimeout(resolve, 10));
    drag('dragover');
  }
  drag('drop');
}"""


def open_dialog(page: Page) -> None:
    page.get_by_role("button", name="Export and import").click()
    expect(page.get_by_role("dialog")).to_be_visible()


def exported(page: Page, name: str) -> Path:
    with page.expect_download() as download:
        page.get_by_role("dialog").get_by_role("button", name=name).click()
    return download.value.path()


def test_what_is_exported_here_is_imported_there(
    open_tab: OpenTab, parrot: LocalServer, axe: str
) -> None:
    first = Chat(open_tab(url=parrot.url))
    first.say("Say **One** <img src=x onerror=alert(1)>")
    open_dialog(first.page)
    assert not serious(first.page, axe)
    file = exported(first.page, "All conversations")
    text = exported(first.page, "This conversation to read").read_text("utf-8")
    assert "## You\n\nSay **One** <img src=x onerror=alert(1)>\n\n## Answer\n\n**One** <img" in text
    assert json.loads(file.read_text("utf-8"))["version"] == 1

    other = Chat(open_tab(url=parrot.url))
    open_dialog(other.page)
    with other.page.expect_file_chooser() as chooser:
        other.page.get_by_role("button", name="Import a file").click()
    chooser.value.set_files(file)
    expect(other.page.get_by_text("Imported 1 conversation.")).to_be_visible()
    assert other.texts() == first.texts()
    assert other.page.locator(".message img").count() == 0
    # It goes on from what was imported.
    assert other.say("Say Two") == "Two"
    assert len(other.texts()) == 4


def test_a_file_may_be_dropped_and_a_foreign_one_is_refused(
    open_tab: OpenTab, parrot: LocalServer
) -> None:
    page = open_tab(url=parrot.url).page
    conversation = {"title": "Dropped", "items": [{"role": "user", "content": "<b>hello</b>"}]}
    file = {"format": "session-server.conversations", "version": 1, "conversations": [conversation]}
    page.evaluate(DROP, [json.dumps(file)])
    expect(page.locator(".message.user .text")).to_have_text("<b>hello</b>")
    page.evaluate(DROP, ["<html>"])
    expect(page.get_by_text("This file is not JSON")).to_be_visible()
    open_dialog(page)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import a file").click()
    broken = json.dumps(file | {"version": 9}).encode()
    chooser.value.set_files(FilePayload(name="x.json", mimeType="application/json", buffer=broken))
    expect(page.get_by_role("dialog").get_by_text("version 9")).to_be_visible()
