"""A client of OpenAI's Realtime: the types of the `openai` package judge every event."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, get_args

from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from session_server.protocol.realtime import REALTIME
from tests.web.published_frames import PublishedFrames

_KINDS: dict[str, TypeAdapter[Any]] = {
    get_args(kind.model_fields["type"].annotation)[0]: TypeAdapter(kind)
    for kind in get_args(get_args(RealtimeServerEvent)[0])
}
"""What the union `RealtimeServerEvent` has for each type: trying them all is slow."""

_PUBLISHED = PublishedFrames(REALTIME)


def judged(event: dict[str, Any]) -> dict[str, Any]:
    """An event, if the SDK's types and the published schema accept it as what it says it is."""
    _PUBLISHED.check(event)
    return judged_by_sdk(event)


def judged_by_sdk(event: dict[str, Any]) -> dict[str, Any]:
    """An event, if the SDK's types accept it as what it says it is."""
    if event["type"] != "input_text.drafted":  # only after `x_events`
        _KINDS[event["type"]].validate_python(event)
    assert event["event_id"]
    return event


@dataclass
class RealtimeWire:
    """The client's end of a connection; `events` are all that came."""

    socket: ClientConnection
    events: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, kind: str, **fields: object) -> None:
        """One event."""
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self) -> dict[str, Any]:
        """The next event."""
        event = judged(json.loads(await self.socket.recv()))
        self.events.append(event)
        return event

    async def until(self, *kinds: str) -> dict[str, Any]:
        """The next event of one of these types."""
        while True:
            event = await self.receive()
            if event["type"] in kinds:
                return event

    async def say(self, text: str, **fields: object) -> str:
        """Put a user's message into the conversation; its id."""
        item = message(text, **fields)
        await self.send("conversation.item.create", item=item)
        while True:
            done = await self.until("conversation.item.done", "error")
            if done["item"]["content"] == item["content"]:
                item_id: str = done["item"]["id"]
                return item_id

    async def answer(self, **response: object) -> dict[str, Any]:
        """Ask for a response; how it ended."""
        fields = {"max_output_tokens": 4, "temperature": 0, **response}
        await self.send("response.create", response=fields)
        done = await self.until("response.done", "error")
        assert done["type"] == "response.done", done
        response_body: dict[str, Any] = done["response"]
        return response_body

    async def refusal(self) -> dict[str, Any]:
        """The next event, which is an error."""
        event = await self.receive()
        assert event["type"] == "error", event
        error: dict[str, Any] = event["error"]
        return error

    async def close_code(self) -> int | None:
        """Read to the end of the connection; its close code."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.receive()
        return self.socket.close_code

    def kinds(self) -> list[str]:
        """The types of all events."""
        return [event["type"] for event in self.events]

    def ids(self) -> list[str]:
        """The ids of the items that the server has told of."""
        return [
            event["item"]["id"]
            for event in self.events
            if event["type"] == "conversation.item.added"
        ]


def message(text: str, role: str = "user", **fields: object) -> dict[str, Any]:
    """An item."""
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text}]
    return {"type": "message", "role": role, "content": content, **fields}


def usage(response: dict[str, Any]) -> tuple[int, int, int]:
    """Of the context, of it cached, and in all."""
    tokens = response["usage"]
    cached = tokens["input_token_details"]["cached_tokens"]
    return tokens["input_tokens"], cached, tokens["total_tokens"]


@contextlib.asynccontextmanager
async def realtime(url: str, query: str = "", **options: Any) -> AsyncIterator[RealtimeWire]:
    """A connection that has been greeted."""
    base = url.replace("http://", "ws://", 1)
    defaults = {"compression": None, "proxy": None, "close_timeout": 0.2}
    async with connect(f"{base}/v1/realtime{query}", **{**defaults, **options}) as socket:
        wire = RealtimeWire(socket)
        assert (await wire.receive())["type"] == "session.created"
        assert (await wire.receive())["type"] == "conversation.created"
        yield wire
