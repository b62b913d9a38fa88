"""The `openai` package's Realtime against a real server: strict types, usage, and a lost line."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai.resources.realtime.realtime import RealtimeConnection

from session_server.local_server import LocalServer
from tests.web.realtime_client import judged, message

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager")
"""The package calls `websockets` in a way that its newest version will not take any more."""

SAID = ("My name is Ada.", "My city is Oslo.", "What is my name?", "What is my city?")


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as made:
        yield made


class Talk:
    """One side of a conversation: every event is judged, and the last one is remembered."""

    def __init__(self, connection: RealtimeConnection) -> None:
        self.connection = connection
        self.events: list[dict[str, Any]] = []

    def until(self, *kinds: str) -> dict[str, Any]:
        for event in self.connection:
            self.events.append(judged(event.to_dict()))
            if event.type in kinds:
                return self.events[-1]
        raise AssertionError("the connection ended")

    def say(self, text: str) -> dict[str, Any]:
        self.connection.conversation.item.create(item=message(text))  # type: ignore[arg-type]
        self.connection.response.create(response={"max_output_tokens": 40})
        response: dict[str, Any] = self.until("response.done", "error")["response"]
        return response


def text_of(response: dict[str, Any]) -> str:
    text: str = response["output"][0]["content"][0]["text"]
    return text


def test_ten_turns_compute_what_is_new(client: openai.OpenAI) -> None:
    with client.realtime.connect(model="session-server-embedded") as connection:
        talk = Talk(connection)
        talk.until("conversation.created")
        connection.send(
            {"type": "session.update", "session": {"type": "realtime", "temperature": 0}}  # type: ignore[typeddict-unknown-key]
        )
        assert talk.until("session.updated")["session"]["temperature"] == 0
        total = 0
        answers = []
        for said in (*SAID, *SAID, *SAID[:2]):
            response = talk.say(said)
            usage = response["usage"]
            cached = usage["input_token_details"]["cached_tokens"]
            assert cached in ((total, total - 1) if total else (0,))
            total = usage["total_tokens"]
            answers.append(text_of(response))
        assert "Ada" in answers[2]
        assert "Oslo" in answers[3]


@contextmanager
def cut(connection: RealtimeConnection) -> Iterator[None]:
    """Cut the line of a connection: what the client sees is 1006."""
    yield
    raw: socket.socket = connection._connection.socket
    raw.shutdown(socket.SHUT_RDWR)


def test_a_client_whose_line_is_cut_comes_back_and_misses_nothing(client: openai.OpenAI) -> None:
    talks: list[Talk] = []

    def come_back(_: object) -> Any:
        # Not the event after which the line was cut: what had arrived by then is still read.
        last = talks[0].events[-1]["event_id"]
        return {"extra_query": {"session_id": "cut", "last_event_id": last}}

    with client.realtime.connect(
        extra_query={"session_id": "cut"}, on_reconnecting=come_back, initial_delay=0.01
    ) as connection:
        talk = Talk(connection)
        talks.append(talk)
        talk.until("conversation.created")
        first = talk.say("My name is Ada.")
        connection.conversation.item.create(item=message("Count from 1 to 50."))  # type: ignore[arg-type]
        connection.response.create(response={"max_output_tokens": 100})
        with cut(connection):
            talk.until("response.output_text.delta")
        done = talk.until("response.done")["response"]
        assert done["status"] in ("completed", "incomplete")
        behind = talk.events[[event["type"] for event in talk.events].index("response.done") + 1 :]
        assert "".join(event["delta"] for event in behind if "delta" in event) == text_of(done)
        again = talk.say("What is my name?")
        assert "Ada" in text_of(again)
        assert first["conversation_id"] == again["conversation_id"]


def test_the_async_client_dispatches_events_and_cancels(server: LocalServer) -> None:
    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        async with client.realtime.connect(model="session-server-embedded") as connection:
            ended: list[dict[str, Any]] = []

            @connection.on("event")
            async def judge(event: Any) -> None:
                judged(event.to_dict())

            @connection.on("response.output_text.delta")
            async def stop(event: Any) -> None:
                await connection.response.cancel(response_id=event.response_id)

            @connection.on("response.done")
            async def end(event: Any) -> None:
                ended.append(event.to_dict()["response"])
                await connection.close()

            await connection.conversation.item.create(item=message("Count from 1 to 1000."))  # type: ignore[arg-type]
            await connection.response.create()
            await connection.dispatch_events()
        assert ended[0]["status"] == "cancelled"
        assert ended[0]["output"][0]["status"] == "incomplete"
        await client.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_client_of_the_beta_is_understood(server: LocalServer) -> None:
    url = server.url.replace("http", "ws", 1)  # it would take TLS otherwise
    client = openai.OpenAI(websocket_base_url=f"{url}/v1", api_key="none")
    with client.beta.realtime.connect(model="session-server-embedded") as connection:
        connection.session.update(session={"modalities": ["text"], "temperature": 0})
        connection.conversation.item.create(item=message("My name is Ada."))  # type: ignore[arg-type]
        connection.response.create()
        kinds: list[str] = []
        while "response.done" not in kinds:
            kinds.append(judged(json.loads(connection.recv_bytes()))["type"])
        assert kinds.count("response.output_text.delta") > 0
        assert "error" not in kinds
