"""Clients of OpenAI's Responses go on after a crash of the server: what they have ids of is there.

Every process is real, and so is the SDK. What a conversation says after a crash is compared with
what it says on a server that was never killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from session_server.local_server import LocalServer
from session_server.sessions.store.database import Database
from tests.wire.test_restart import QUESTIONS, served

SAYS: dict[str, Any] = {
    "model": "session-server-embedded",
    "max_output_tokens": 16,
    "temperature": 0,
}
Call = Callable[[OpenAI], Any]


def client_of(server: LocalServer, key: str = "none") -> OpenAI:
    return OpenAI(
        base_url=f"{server.url}/v1",
        api_key=key,
        max_retries=0,
        timeout=60,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


@dataclass
class Lives:
    """One store, and the servers that use it one after another."""

    directory: Path
    flags: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def server(self, how: signal.Signals = signal.SIGKILL) -> Iterator[LocalServer]:
        """A server that is ended in this way."""
        with served(self.directory, 0, *self.flags) as server:
            yield server
            os.kill(server.pid, how)
            server.wait(timeout_s=60)

    def on_disk(self, text: str) -> bool:
        """Whether these words are in any file of the store."""
        return any(text.encode() in path.read_bytes() for path in self.directory.iterdir())

    def count(self, table: str) -> int:
        with contextlib.closing(sqlite3.connect(self.directory / Database.FILE)) as database:
            (count,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(count)


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(tmp_path / "store")


def ask(client: OpenAI, said: str, **options: Any) -> Response:
    response: Response = client.responses.create(input=said, **(SAYS | options))
    return response


def essence(response: Response) -> tuple[Any, ...]:
    """What the same conversation says again."""
    assert response.usage is not None
    usage = response.usage
    return response.output_text, usage.input_tokens, usage.output_tokens


def durable(response: Response) -> Any:
    return (response.model_extra or {})["durable"]


@pytest.mark.timeout(180)
def test_a_response_goes_on_from_one_before_a_crash_and_before_an_end(
    lives: Lives, plain: LocalServer
) -> None:
    with client_of(plain) as client:
        reference: list[Response] = []
        for said in QUESTIONS:
            previous = reference[-1].id if reference else openai.NOT_GIVEN
            reference.append(ask(client, said, previous_response_id=previous))
        assert durable(reference[0]) is None

    with lives.server() as server, client_of(server) as client:
        first = ask(client, QUESTIONS[0])
        second = ask(client, QUESTIONS[1], previous_response_id=first.id)
        branch = ask(client, "Something else.", previous_response_id=first.id)
        assert (durable(first), durable(second), durable(branch)) == (True, True, True)
    with lives.server(signal.SIGTERM) as server, client_of(server) as client:
        for told in (first, second, branch):
            assert client.responses.retrieve(told.id).to_dict() == told.to_dict()
        (asked,) = client.responses.input_items.list(second.id).data
        assert asked.to_dict()["content"][0]["text"] == QUESTIONS[1]
        third = ask(client, QUESTIONS[2], previous_response_id=second.id)
        assert third.model_extra == second.model_extra  # in the same session
    with lives.server() as server, client_of(server) as client:
        for told in (first, second, branch, third):
            assert client.responses.retrieve(told.id).to_dict() == told.to_dict()
        fourth = ask(client, QUESTIONS[3], previous_response_id=third.id)
        events = list(client.responses.retrieve(second.id, stream=True))
        assert events[-1].response.to_dict() == second.to_dict()  # type: ignore[union-attr]
    told = [first, second, third, fourth]
    assert list(map(essence, told)) == list(map(essence, reference))


@pytest.mark.timeout(180)
def test_a_conversation_goes_on_with_its_items(lives: Lives, plain: LocalServer) -> None:
    def begin(client: OpenAI) -> str:
        items: Any = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
        made = client.conversations.create(items=items, metadata={"a": "b"})
        return made.id

    def change(client: OpenAI, name: str) -> None:
        client.conversations.items.create(name, items=[{"role": "user", "content": "Between"}])
        client.conversations.update(name, metadata={"c": "d"})
        listed = client.conversations.items.list(name, order="asc").data
        client.conversations.items.delete(str(listed[0].id), conversation_id=name)

    with client_of(plain) as client:
        name = begin(client)
        reference = [ask(client, said, conversation=name) for said in QUESTIONS[:2]]
        change(client, name)
        reference += [ask(client, said, conversation=name) for said in QUESTIONS[2:]]

    with lives.server() as server, client_of(server) as client:
        name = begin(client)
        told = [ask(client, QUESTIONS[0], conversation=name)]
    with lives.server() as server, client_of(server) as client:
        told.append(ask(client, QUESTIONS[1], conversation=name))
        change(client, name)
        before = [item.to_dict() for item in client.conversations.items.list(name, order="asc")]
    with lives.server() as server, client_of(server) as client:
        assert client.conversations.retrieve(name).metadata == {"c": "d"}
        after = [item.to_dict() for item in client.conversations.items.list(name, order="asc")]
        assert after == before
        told += [ask(client, said, conversation=name) for said in QUESTIONS[2:]]
        client.conversations.delete(name)
    with lives.server() as server, client_of(server) as client:
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(name)
        assert client.responses.retrieve(told[0].id).output_text == told[0].output_text
    assert list(map(essence, told)) == list(map(essence, reference))


@pytest.mark.timeout(180)
def test_what_is_deleted_or_not_to_be_stored_is_not_on_disk(lives: Lives) -> None:
    with lives.server() as server, client_of(server) as client:
        first = ask(client, "A secret of the vault.")
        second = ask(client, "And a key of the gate.", previous_response_id=first.id)
        unstored = ask(client, "Never write this down.", store=False)
        beside = ask(client, "Nor that either.", store=False, previous_response_id=first.id)
        assert (durable(unstored), durable(beside)) == (None, None)
        kept = ask(client, "A known fact.")
    assert lives.on_disk("vault")
    assert not lives.on_disk("write this down")
    assert not lives.on_disk("Nor that either")
    with lives.server() as server, client_of(server) as client:
        for response in (unstored, beside):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response.id)
        client.responses.delete(first.id)
        assert client.responses.retrieve(second.id).id == second.id
        client.responses.delete(second.id)
    with lives.server(signal.SIGTERM) as server, client_of(server) as client:
        for response in (first, second):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response.id)
        assert client.responses.retrieve(kept.id).id == kept.id
    assert (lives.count("records"), lives.count("sessions")) == (1, 1)
    assert not lives.on_disk("vault")
    assert not lives.on_disk("gate")


@pytest.mark.timeout(180)
def test_a_response_in_the_background_that_a_crash_interrupts_has_failed(lives: Lives) -> None:
    with lives.server() as server, client_of(server) as client:
        first = ask(client, QUESTIONS[0])
        begun = ask(
            client,
            "Count from 1 to 1000.",
            background=True,
            previous_response_id=first.id,
            max_output_tokens=4000,
        )
        assert begun.status in ("queued", "in_progress")
    with lives.server() as server, client_of(server) as client:
        found = client.responses.retrieve(begun.id)
        assert found.status == "failed"
        assert found.error is not None
        assert found.error.code == "server_error"
        *_, last = client.responses.retrieve(begun.id, stream=True)
        assert last.type == "response.failed"
        with pytest.raises(openai.BadRequestError, match="left nothing"):
            ask(client, "And?", previous_response_id=begun.id)
        again = ask(client, QUESTIONS[1], previous_response_id=first.id)
        assert again.output_text


@pytest.mark.timeout(180)
def test_another_key_finds_nothing_after_the_crash_either(lives: Lives, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann {'a' * 32}\nbob {'b' * 32}\n")
    keys.chmod(0o600)
    lives.flags = ["--api-key-file", str(keys)]
    with lives.server() as server, client_of(server, "a" * 32) as ann:
        hers = ask(ann, "Hello")
        name = ann.conversations.create().id
    with (
        lives.server() as server,
        client_of(server, "a" * 32) as ann,
        client_of(server, "b" * 32) as bob,
    ):
        calls: tuple[Call, ...] = (
            lambda him: him.responses.retrieve(hers.id),
            lambda him: him.responses.delete(hers.id),
            lambda him: ask(him, "And?", previous_response_id=hers.id),
            lambda him: him.conversations.retrieve(name),
            lambda him: him.conversations.delete(name),
        )
        for call in calls:
            with pytest.raises(openai.APIStatusError, match="not found"):
                call(bob)
        assert ann.responses.retrieve(hers.id).to_dict() == hers.to_dict()
        assert ann.conversations.retrieve(name).id == name
