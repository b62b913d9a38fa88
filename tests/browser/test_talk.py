"""A conversation: said, stopped, changed, taken up again, branched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import expect

from session_server.local_server import LocalServer
from tests.browser.chat import LONG, Chat, flat, items_of, said
from tests.browser.conftest import OpenTab

FORK = "Fork here: another conversation with all up to this"
COUNT = "Count from 1 to 1000."


@pytest.fixture
def chat(open_tab: OpenTab) -> Chat:
    """The page over the embedded model, nothing said."""
    return Chat(open_tab())


def test_a_first_message_is_answered_and_counted(chat: Chat, http: httpx.Client) -> None:
    assert "Ada" in chat.say("My name is Ada.")
    assert chat.say("What is my name?") == "Your name is Ada."
    assert chat.texts() == items_of(http, chat.session_id)
    usage = chat.end()["usage"]
    cached, total = usage["cached_tokens"], usage["input_tokens"]
    assert cached > 0
    figures = flat(chat.answers.last.inner_text())
    assert f"in {total} ({cached} cached, {total - cached} new)" in figures
    assert f"out {usage['output_tokens']}" in figures
    assert "ttft" in figures
    assert "tok/s" in figures


@contextlib.contextmanager
def crowd(http: httpx.Client, size: int) -> Iterator[None]:
    """Others whose long texts are read meanwhile: a step takes longer than a message's way."""
    headers = {"accept": "text/event-stream"}
    with contextlib.ExitStack() as turns:
        for number in range(size):
            session_id = http.post("/v1/sessions", json={}).json()["id"]
            path = f"/v1/sessions/{session_id}/turns"
            body = {"input": f"{number} and on. " * 400, "generate": False}
            turns.enter_context(http.stream("POST", path, json=body, headers=headers))
        yield


def test_stop_ends_the_turn_within_two_steps(chat: Chat, http: httpx.Client) -> None:
    with crowd(http, 24):
        chat.send(COUNT)
        expect(chat.text).to_contain_text("1")
        chat.button("Stop").click()
        chat.rest()
    end = chat.end()
    assert end["type"] == "turn.cancelled"
    # The first token comes with the forward of the prompt. What was computed beyond what had been
    # delivered when the server heard of the stop is what the stop cost.
    assert 0 <= end["timings"]["num_steps"] - end["usage"]["output_tokens"] <= 2
    assert chat.answer() == items_of(http, chat.session_id)[-1]
    assert "Ada" in chat.say("My name is Ada."), "the session goes on"
    chat.until(lambda: not active(http))


def active(http: httpx.Client) -> int:
    """Pages of turns that run."""
    report = http.get("/v1/admin/memory", params={"full": 1}).json()
    return int(report["pools"]["full"]["active"])


def test_a_question_is_edited_and_what_followed_is_gone(chat: Chat, http: httpx.Client) -> None:
    chat.say("My name is Ada.")
    chat.say("What is my name?")
    with chat.answering():
        chat.edit(chat.articles.first, "My name is Eve.")
    expect(chat.articles).to_have_count(2)
    assert "Eve" in chat.answer()
    assert chat.say("What is my name?") == "Your name is Eve."
    assert chat.texts() == items_of(http, chat.session_id)
    chat.button("Branches of this conversation").click()
    rows = chat.page.get_by_role("dialog", name="Branches").get_by_role("listitem")
    expect(rows.first).to_contain_text("My name is Eve.")
    expect(rows.last).to_contain_text("My name is Ada.")


def test_an_answer_is_given_anew(chat: Chat, http: httpx.Client) -> None:
    chat.say("My name is Ada.")
    turns = len(chat.witness.frames("turn.completed"))
    with chat.answering():
        chat.press("Answer again", chat.answers.last)
    expect(chat.articles).to_have_count(2)
    assert len(chat.witness.frames("turn.completed")) == turns + 1
    assert "Ada" in chat.answer()
    assert chat.texts() == items_of(http, chat.session_id)


def test_an_answer_is_edited_and_gone_on_from(
    open_tab: OpenTab, parrot: LocalServer, parrot_http: httpx.Client
) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.say("Say one two three.")
    with chat.answering():
        chat.edit(chat.answers.last, "One, two")
    assert chat.answer() == "One, two, and so on."
    assert chat.texts() == ["Say one two three.", "One, two, and so on."]
    assert chat.texts() == items_of(parrot_http, chat.session_id)


def test_an_editor_says_what_enter_does(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.say("Say one.")
    question, answer = chat.articles.first, chat.answers.last
    chat.press("Edit this message", question)
    expect(question.get_by_text("Enter sends it, Shift+Enter begins a new line.")).to_be_visible()
    chat.press("Edit this answer", answer)
    expect(answer.get_by_text("Ctrl+Enter saves it, Enter begins a new line.")).to_be_visible()
    answer.get_by_role("textbox").fill("One")
    chat.page.keyboard.press("Enter")
    chat.page.keyboard.type("two")
    with chat.answering():
        chat.page.keyboard.press("ControlOrMeta+Enter")
    assert chat.answer() == "One two, and so on."


def test_what_was_stopped_is_continued(
    open_tab: OpenTab, parrot: LocalServer, parrot_http: httpx.Client
) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.send(LONG)
    expect(chat.text).to_contain_text("word9")
    chat.button("Stop").click()
    chat.rest()
    stopped = chat.answer()
    assert stopped != said(LONG)
    with chat.answering():
        chat.press("Go on with this answer", chat.answers.last)
    assert chat.answer() == said(LONG)
    assert chat.texts() == items_of(parrot_http, chat.session_id)


def test_what_is_sent_meanwhile_waits_its_turn(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.send(LONG)
    expect(chat.text).to_contain_text("word9")
    chat.send("Say second.")
    expect(chat.answers).to_have_count(2)
    chat.rest()
    assert chat.texts() == [LONG, said(LONG), "Say second.", "second."]


def test_what_is_sent_meanwhile_interrupts(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.send(LONG)
    expect(chat.text).to_contain_text("word9")
    chat.message.fill("Say second.")
    chat.button("Interrupt").click()
    expect(chat.text).to_have_text("second.")
    chat.rest()
    first, cut, *rest = chat.texts()
    assert first == LONG
    assert said(LONG).startswith(cut)
    assert cut != said(LONG)
    assert rest == ["Say second.", "second."]


def test_typing_ahead_saves_prefill(chat: Chat) -> None:
    chat.say("My name is Ada.")
    chat.message.press_sequentially("Please tell me, if you still know it: what is my ", delay=20)
    chat.hear("turn.drafted")
    chat.message.press_sequentially("name?")
    with chat.answering():
        chat.button("Send").click()
    assert chat.end()["usage"]["drafted_tokens"] > 0


def test_a_fork_leaves_the_other_branch_alone(
    open_tab: OpenTab, parrot: LocalServer, parrot_http: httpx.Client
) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.say("Say one.")
    chat.say("Say two.")
    trunk = chat.session_id
    chat.press(FORK, chat.answers.first)
    expect(chat.articles).to_have_count(2)
    chat.say("Say other.")
    assert chat.texts() == ["Say one.", "one.", "Say other.", "other."]
    assert chat.session_id != trunk
    assert items_of(parrot_http, chat.session_id) == chat.texts()
    assert items_of(parrot_http, trunk) == ["Say one.", "one.", "Say two.", "two."]


def test_every_branch_is_found_again(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.say("Say one.")
    chat.say("Say two.")
    trunk = chat.texts()
    chat.press(FORK, chat.answers.first)
    expect(chat.articles).to_have_count(2)
    chat.say("Say other.")
    with chat.answering():
        chat.edit(chat.articles.nth(2), "Say another.")
    assert chat.texts() == ["Say one.", "one.", "Say another.", "another."]
    chat.press("The version before", chat.articles.nth(2))
    expect(chat.text).to_have_text("other.")
    chat.press("The version after", chat.articles.nth(2))
    expect(chat.text).to_have_text("another.")
    chat.button("Branches of this conversation").click()
    dialog = chat.page.get_by_role("dialog", name="Branches")
    expect(dialog.get_by_role("listitem")).to_have_count(3)
    expect(dialog.get_by_text("shown now")).to_have_count(1)
    dialog.get_by_role("listitem").first.get_by_role("button").click()
    expect(chat.articles).to_have_count(4)
    assert chat.texts() == trunk
    assert chat.say("Say three.") == "three."
    assert chat.texts() == [*trunk, "Say three.", "three."]


def test_a_message_that_is_edited_stays_in_sight(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    for number in range(8):
        chat.say(f"Say {number}.")
    early = chat.page.get_by_role("article", name="You").nth(4)
    chat.press("Edit this message", early)
    box = early.get_by_role("textbox")
    expect(box).to_be_focused()
    chat.page.evaluate("() => new Promise((drawn) => requestAnimationFrame(drawn))")
    expect(box).to_be_in_viewport(ratio=1)
    chat.page.keyboard.press("Escape")
    expect(box).to_have_count(0)


def test_what_is_typed_behind_a_stop_is_the_next_message(open_tab: OpenTab) -> None:
    chat = Chat(open_tab())
    chat.send("Count from 1 to 1000.")
    chat.button("Stop").click()
    expect(chat.button("Stop")).to_be_hidden()
    chat.page.keyboard.type("nice")
    expect(chat.message).to_have_value("nice")
