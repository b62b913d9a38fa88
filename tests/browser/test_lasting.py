"""Nothing that was typed or shown is lost: reloads, lost lines, dead servers, second tabs."""

from __future__ import annotations

import os
import re
import signal
import socket

import httpx
import pytest
from playwright.sync_api import expect

from session_server.local_server import LocalServer
from tests.browser.chat import LONG, Chat, items_of, said
from tests.browser.conftest import FLAGS, OpenTab
from tests.browser.line import Line

BACK = re.compile("live|resumed|replayed")
ASKED = [LONG, said(LONG)]


def begin(chat: Chat) -> None:
    """Ask for a long answer and see its beginning."""
    chat.send(LONG)
    expect(chat.text).to_contain_text("word9")


def test_a_reload_in_the_middle_changes_nothing(
    open_tab: OpenTab, parrot: LocalServer, parrot_http: httpx.Client
) -> None:
    chat = Chat(open_tab(url=parrot.url))
    begin(chat)
    for _ in range(2):
        shown = chat.answer()
        chat.page.reload()
        expect(chat.button("Stop")).to_be_visible()
        expect(chat.text).to_contain_text(shown)
    chat.rest()
    assert chat.texts() == items_of(parrot_http, chat.session_id) == ASKED
    chat.page.reload()
    expect(chat.articles).to_have_count(2)
    assert chat.texts() == ASKED


def test_what_is_typed_survives_a_reload(open_tab: OpenTab) -> None:
    chat = Chat(open_tab())
    chat.say("My name is Ada.")
    chat.message.fill("Not sent yet")
    chat.page.reload()
    expect(chat.message).to_have_value("Not sent yet")


def test_offline_and_online(
    open_tab: OpenTab, parrot: LocalServer, parrot_http: httpx.Client
) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.witness.allow("ERR_INTERNET_DISCONNECTED")
    begin(chat)
    chat.tab.context.set_offline(True)
    expect(chat.connection).to_have_text("offline", timeout=15_000)
    chat.message.fill("Say later.")
    chat.tab.context.set_offline(False)
    expect(chat.connection).not_to_have_text("offline", timeout=15_000)
    chat.rest()
    assert chat.texts() == items_of(parrot_http, chat.session_id) == ASKED
    expect(chat.message).to_have_value("Say later.")


def test_a_line_that_is_cut_comes_back(
    open_tab: OpenTab, parrot: LocalServer, parrot_http: httpx.Client
) -> None:
    with Line(parrot.url) as line:
        chat = Chat(open_tab(url=line.url))
        chat.witness.allow("WebSocket connection|ERR_")
        begin(chat)
        for _ in range(2):
            line.cut()
            expect(chat.connection).to_contain_text("reconnecting")
            line.mend()
            expect(chat.connection).to_contain_text(BACK)
        chat.rest()
        assert chat.texts() == items_of(parrot_http, chat.session_id) == ASKED
        assert chat.say("Say after.") == "after."


def test_what_is_sent_without_a_line_is_sent_once(open_tab: OpenTab, parrot: LocalServer) -> None:
    with Line(parrot.url) as line:
        chat = Chat(open_tab(url=line.url))
        chat.witness.allow("WebSocket connection|ERR_")
        chat.say("Say one.")
        line.cut()
        expect(chat.connection).to_contain_text("reconnecting")
        chat.send("Say two.")
        line.mend()
        expect(chat.answers).to_have_count(2)
        chat.rest()
        assert chat.texts() == ["Say one.", "one.", "Say two.", "two."]


def test_two_tabs_have_two_conversations(open_tab: OpenTab, parrot: LocalServer) -> None:
    first = Chat(open_tab(url=parrot.url))
    first.say("Say alpha.")
    second = Chat(open_tab(url=parrot.url, beside=first.tab))
    second.button("New conversation").click()
    expect(second.articles).to_have_count(0)
    letters = " ".join("alpha" for _ in range(200))
    digits = " ".join("beta" for _ in range(200))
    first.send(f"Say {letters}")
    second.send(f"Say {digits}")
    for chat in (first, second):
        expect(chat.text).to_contain_text("a")
        chat.rest()
    assert first.texts() == ["Say alpha.", "alpha.", f"Say {letters}", letters]
    assert second.texts() == [f"Say {digits}", digits]
    assert first.session_id != second.session_id


def test_of_two_tabs_with_one_session_the_newer_has_it(
    open_tab: OpenTab, parrot: LocalServer
) -> None:
    first = Chat(open_tab(url=parrot.url))
    first.say("Say one.")
    second = Chat(open_tab(first.hash, url=parrot.url, beside=first.tab))
    expect(second.articles).to_have_count(2)
    assert second.say("Say two.") == "two."
    assert second.session_id == first.session_id
    first.button("Use it here").click()
    expect(first.articles).to_have_count(4)
    assert first.say("Say three.") == "three."
    expect(second.button("Use it here")).to_be_visible()
    assert first.texts() == ["Say one.", "one.", "Say two.", "two.", "Say three.", "three."]


@pytest.fixture
def port() -> str:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def kill(server: LocalServer) -> None:
    """End a server as a crash would."""
    os.kill(server.pid, signal.SIGKILL)
    server.wait()


def test_a_server_that_dies_takes_nothing_with_it(open_tab: OpenTab, port: str) -> None:
    with LocalServer([*FLAGS, "--port", port]) as old:
        chat = Chat(open_tab(url=old.url))
        chat.witness.allow("WebSocket connection|ERR_|404")
        chat.say("My name is Ada.")
        before = chat.texts()
        chat.message.fill("What is my name?")
        kill(old)
        expect(chat.connection).to_contain_text("reconnecting")
        assert chat.texts() == before
    with LocalServer([*FLAGS, "--port", port]):
        expect(chat.connection).not_to_contain_text("reconnecting", timeout=15_000)
        assert chat.texts() == before
        expect(chat.message).to_have_value("What is my name?")
        with chat.answering():
            chat.button("Send").click()
        assert chat.texts() == [*before, "What is my name?", "Your name is Ada."]


def test_a_server_that_dies_in_an_answer_leaves_what_it_has_said(
    open_tab: OpenTab, port: str
) -> None:
    with LocalServer([*FLAGS, "--port", port]) as old:
        chat = Chat(open_tab(url=old.url))
        chat.witness.allow("WebSocket connection|ERR_|404")
        chat.say("My name is Ada.")
        chat.send("Count from 1 to 1000.")
        expect(chat.text).to_contain_text("15 16")
        kill(old)
        expect(chat.connection).to_contain_text("reconnecting")
        shown = chat.texts()
    with LocalServer([*FLAGS, "--port", port]):
        expect(chat.button("Stop")).to_have_count(0, timeout=15_000)
        assert chat.texts() == shown
        chat.page.reload()
        expect(chat.articles).to_have_count(4)
        assert chat.texts() == shown
        with chat.answering():
            chat.press("Go on with this answer", chat.answers.last)
        assert chat.texts()[:3] == shown[:3]
        assert chat.answer().startswith(shown[3])
        assert len(chat.answer()) > len(shown[3])
