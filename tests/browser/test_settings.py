"""What is set for a conversation reaches the server in the wire's own words, or is refused here."""

from __future__ import annotations

import json

import httpx
from playwright.sync_api import expect

from session_server.local_server import LocalServer
from tests.browser.chat import Chat, items_of
from tests.browser.conftest import OpenTab

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Eve"]}, "known": {"type": "boolean"}},
    "required": ["name", "known"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_a_system_prompt_stands_before_what_was_said(open_tab: OpenTab, http: httpx.Client) -> None:
    chat = Chat(open_tab())
    chat.say("My name is Ada.")
    first = chat.session_id
    chat.settings({"System prompt": "Be brief."})
    assert chat.say("What is my name?") == "Your name is Ada."
    assert chat.session_id != first, "another prompt is another session"
    system, *rest = items_of(http, chat.session_id)
    assert system == "Be brief."
    assert rest == chat.texts()
    chat.button("Settings").click()
    expect(chat.page.get_by_label("System prompt")).to_have_value("Be brief.")


def test_a_wrong_setting_is_said_where_it_is(open_tab: OpenTab) -> None:
    chat = Chat(open_tab())
    chat.button("Settings").click()
    dialog = chat.page.get_by_role("dialog", name="Settings")
    field = dialog.get_by_label("Temperature")
    field.fill("warm")
    chat.button("Save", dialog).click()
    expect(field).to_be_focused()
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(dialog.get_by_text("A number from 0 to 100.")).to_be_visible()
    schema = dialog.get_by_label("JSON schema")
    dialog.get_by_text("Answers as JSON").click()
    field.fill("0.5")
    schema.fill('{"type": "object"')
    chat.button("Save", dialog).click()
    expect(schema).to_be_focused()
    expect(dialog.get_by_text("This is not JSON")).to_be_in_viewport(ratio=1)
    schema.fill("")
    expect(dialog.get_by_text("A number from 0 to 100.")).to_be_hidden()
    chat.button("Save", dialog).click()
    expect(dialog).to_have_count(0)
    chat.say("My name is Ada.")
    (created,) = chat.witness.frames("turn.create")
    assert created["sampling"]["temperature"] == 0.5


def test_an_answer_is_held_to_a_schema(open_tab: OpenTab) -> None:
    chat = Chat(open_tab())
    chat.settings({"JSON schema": json.dumps(SCHEMA)}, fold="Answers as JSON")
    chat.say("My name is Ada.")
    told = json.loads(chat.end()["item"]["content"])
    assert set(told) == {"name", "known"}
    assert told["name"] in {"Ada", "Eve"}
    assert isinstance(told["known"], bool)
    assert json.loads(chat.answer()) == told


def test_the_example_of_a_schema_ends_on_the_embedded_model(open_tab: OpenTab) -> None:
    chat = Chat(open_tab())
    chat.button("Settings").click()
    dialog = chat.page.get_by_role("dialog", name="Settings")
    dialog.get_by_text("Answers as JSON", exact=True).click()
    chat.button("Insert an example", dialog).last.click()
    chat.button("Save", dialog).click()
    told = json.loads(chat.say("My name is Ada."))
    assert chat.end()["finish_reason"] == "stop"
    assert set(told) == {"answer", "confidence"}


def test_a_call_is_answered_by_hand(
    open_tab: OpenTab, parrot: LocalServer, parrot_http: httpx.Client
) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.button("Settings").click()
    dialog = chat.page.get_by_role("dialog", name="Settings")
    dialog.get_by_text("Tools", exact=True).click()
    chat.button("Insert an example", dialog).first.click()
    chat.button("Save", dialog).click()
    with chat.answering():
        chat.send(f"Say {CALL}")
    expect(chat.answers.last).to_contain_text("weather")
    expect(chat.answers.last).to_contain_text('"city": "Oslo"')
    chat.page.get_by_role("textbox", name="What weather returns").fill('{"degrees": 4}')
    with chat.answering():
        chat.button("Give it to the model").click()
    assert chat.answer() == 'The tool says: {"degrees": 4}'
    roles = [
        item["role"]
        for item in parrot_http.get(f"/v1/sessions/{chat.session_id}/items").json()["data"]
    ]
    assert roles == ["user", "assistant", "tool", "assistant"]
