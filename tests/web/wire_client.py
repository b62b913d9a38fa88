"""The client's end of a connection, with nothing between the test and what is said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from tests.web.published_frames import PublishedFrames

SUBPROTOCOL = Subprotocol("kvsession.v1")

DEADLINE_S = 60.0
_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used; making one per client is slow


def http_client(url: str, *, timeout_s: float = DEADLINE_S) -> httpx.AsyncClient:
    """A client of plain HTTP: no proxy, no TLS, a bounded patience."""
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=timeout_s, verify=_TLS)


PUBLISHED = PublishedFrames(SUBPROTOCOL)


@dataclass
class Wire:
    """The client's end of a WebSocket, speaking JSON."""

    socket: ClientConnection
    hello: dict[str, Any] = field(default_factory=dict)
    frames: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, kind: str, **fields: object) -> None:
        """One frame."""
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self) -> dict[str, Any]:
        """The next frame."""
        payload = await self.socket.recv()
        assert isinstance(payload, str), "frames are text"
        frame: dict[str, Any] = json.loads(payload)
        PUBLISHED.check(frame)
        self.frames.append(frame)
        return frame

    async def until(self, *kinds: str) -> dict[str, Any]:
        """The next frame of one of these types; what comes before it is kept in `frames`."""
        while True:
            frame = await self.receive()
            if frame["type"] in kinds:
                return frame

    async def turn(self, turn_id: str, **fields: Any) -> dict[str, Any]:
        """Run a turn to its end."""
        await self.send("turn.create", turn_id=turn_id, **turn(**fields))
        return await self.until("turn.completed", "turn.cancelled", "turn.failed", "error")

    async def close_code(self) -> int | None:
        """Read to the end of the connection; its close code."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.receive()
        return self.socket.close_code


def turn(text: str = "Hello", *, max_tokens: int = 4, **fields: object) -> dict[str, Any]:
    """The fields of a small greedy turn."""
    sampling = {"temperature": 0, "max_tokens": max_tokens}
    content = {} if {"text", "input", "input_ids"} & set(fields) else {"text": text}
    return {"sampling": sampling, **content, **fields}


async def narrow_socket(port: int, *, receive_buffer: int = 4096) -> socket.socket:
    """A connection whose receive buffer holds next to nothing."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, ("127.0.0.1", port))
    return narrow


@contextlib.asynccontextmanager
async def open_wire(
    url: str, session_id: str = "new", query: str = "", **options: Any
) -> AsyncIterator[Wire]:
    """A WebSocket to a session that has heard nothing yet."""
    base = url.replace("http://", "ws://", 1)
    # A client that has stopped reading does not see the answer to its close either.
    defaults = {"compression": None, "proxy": None, "close_timeout": 0.2}
    options = {"subprotocols": [SUBPROTOCOL]} | defaults | options
    async with connect(f"{base}/v1/sessions/{session_id}/ws{query}", **options) as socket:
        yield Wire(socket)


@contextlib.asynccontextmanager
async def greeted(url: str, session_id: str = "new", query: str = "") -> AsyncIterator[Wire]:
    """A WebSocket that has heard the hello."""
    async with open_wire(url, session_id, query) as wire:
        wire.hello = await wire.receive()
        yield wire
