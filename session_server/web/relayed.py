"""Serve requests that another server has read, as a proxy hands them on: plain ASGI messages.

Under uvicorn a WebSocket's handler writes to the connection itself (`GuardedWebSocket`). A relayed
one has no connection here: its frames go out in order as ASGI messages. The proxy
bounds what a connection may hold and how long it may take, this server what a message may hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from session_server.web.refusals import HttpRefusal
from session_server.web.signal import Signal
from session_server.web.websocket_guard import CONNECTION


class RelayedRequests:
    """Give every request what its route would find under uvicorn, as ASGI middleware."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._running = set[asyncio.Task[Any]]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. One that `end_all` ends is over without an error."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None, "a request runs in a task"
        self._running.add(task)
        try:
            await self._serve(scope, receive, send)
        except asyncio.CancelledError:
            if task in self._running:
                raise  # somebody else ends it
            task.uncancel()
        finally:
            self._running.discard(task)

    def end_all(self) -> None:
        """End the requests that a drain leaves: streams that end with their reader only."""
        ended, self._running = self._running, set()
        for task in ended:
            task.cancel()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            socket = RelayedSocket(receive, send)
            scope = {**scope, "state": {**scope.get("state", {}), CONNECTION: socket}}
            try:
                await self._app(scope, socket.receive, socket.send)
            finally:
                socket.end()
        else:
            await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """Return what reads a body up to the limit; one in chunks does not say how long it is."""
        num_bytes = 0

        async def receive_within() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                text = f"The body is larger than {self._max_body_bytes} bytes."
                raise HttpRefusal(413, text)
            return message

        return receive_within


class RelayedSocket:
    """Write to a WebSocket whose connection a proxy holds."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.writable = Signal()
        self.writable.set()
        self._receive = receive
        self._send = send
        self._waiting: list[bytes] = []
        self._writer: asyncio.Task[None] | None = None
        self._is_over = False

    def set_behind(self, num_bytes: int) -> None:
        """Count nothing: the proxy takes every frame, and bounds what its peer has not read."""

    @property
    def is_drained(self) -> bool:
        """Return whether `drain` returns at once."""
        return self.writable.is_set()

    async def drain(self) -> None:
        """Wait until the proxy has taken what was written."""
        await self.writable.wait()

    async def receive(self) -> Message:
        """Return the next message of the peer."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self.end()
        return message

    async def send(self, message: Message) -> None:
        """Send a message behind the texts that wait.

        Raises:
            ClientDisconnected: the peer is gone.
        """
        await self._written()
        if self._is_over:
            raise ClientDisconnected
        self._is_over = message["type"] == "websocket.close"
        await self._pass_on(message)

    def send_texts(self, texts: Sequence[bytes]) -> None:
        """Send text messages, UTF-8. Call `drain` before.

        Raises:
            ClientDisconnected: the peer is gone.
        """
        if self._is_over:
            raise ClientDisconnected
        self._waiting += texts
        if self._writer is None:
            self.writable.clear()
            self._writer = asyncio.create_task(self._write(), name="relay")

    def end(self) -> None:
        """Send nothing more."""
        self._is_over = True
        self._waiting.clear()
        self.writable.set()

    async def _write(self) -> None:
        while self._waiting:
            texts, self._waiting = self._waiting, []
            for text in texts:
                await self._pass_on({"type": "websocket.send", "text": text.decode()})
        self._writer = None
        self.writable.set()

    async def _written(self) -> None:
        if self._writer is not None:
            await asyncio.shield(self._writer)  # whoever gives up waiting does not stop it

    async def _pass_on(self, message: Message) -> None:
        try:
            await self._send(message)
        except (OSError, RuntimeError):  # how proxies say that the peer is gone
            self.end()
