"""WebSockets in memory: both ends of a connection to the real application.

What the server sends lies in a buffer until the client takes it; a full buffer makes the server
wait, as a peer that does not read does, and ends the connection if nothing is taken for
`SEND_TIMEOUT_S`. A dropped connection loses what is on its way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import urlencode

from uvicorn.protocols.utils import ClientDisconnected

from session_server.protocol.session_protocol import CloseCode
from session_server.web.websocket_guard import CONNECTION

Message = MutableMapping[str, Any]


class Application(Protocol):
    """An ASGI application (the interface of asgiref's specification, version 3)."""

    def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> Coroutine[Any, Any, None]:
        """Serve one connection."""
        ...


SUBPROTOCOL: Final = "kvsession.v1"
SEND_TIMEOUT_S: Final = 10.0


class _Unguarded:
    """Stand for the `GuardedWebSocket` of a connection."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    def set_behind(self, num_bytes: int) -> None:
        """See `GuardedWebSocket.set_behind`."""

    @property
    def is_drained(self) -> bool:
        """See `GuardedWebSocket.is_drained`."""
        return self._socket.has_room

    async def drain(self) -> None:
        """See `GuardedWebSocket.drain`."""
        await self._socket.find_room()

    def send_texts(self, texts: Sequence[bytes]) -> None:
        """See `GuardedWebSocket.send_texts`."""
        self._socket.send_texts(texts)


class Socket:
    """One connection. `close_code`: how the server ended it; `denied`: the HTTP status with which
    it refused it. `capacity`: frames the network holds for a client that does not read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, capacity: int) -> None:
        self._loop = loop
        self._capacity = capacity
        self._inbound: deque[Message] = deque([{"type": "websocket.connect"}])
        self._outbound: deque[str] = deque()
        self._heard: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_dropped = False
        self.close_code: int | None = None
        self.denied: int | None = None

    def open(
        self, app: Application, session_id: str, *, key: str, query: Mapping[str, str]
    ) -> None:
        """Ask the application for a session's socket."""
        scope: Message = {
            "type": "websocket",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": f"/v1/sessions/{session_id}/ws",
            "raw_path": b"",
            "query_string": urlencode(query).encode(),
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())],
            "subprotocols": [SUBPROTOCOL],
            "extensions": {"websocket.http.response": {}},
            "state": {CONNECTION: _Unguarded(self)},
        }
        self._task = self._loop.create_task(app(scope, self._receive, self._send))

    @property
    def is_over(self) -> bool:
        """Whether the server has nothing more to do with it."""
        return self._task is not None and self._task.done()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come, what lies in the buffer included."""
        is_ended = self.close_code is not None or self.denied is not None
        return self.is_dropped or (is_ended and not self._outbound)

    def put(self, frame: str) -> None:
        """The client sends one text frame."""
        self._inbound.append({"type": "websocket.receive", "text": frame})
        _wake(self._heard)

    def take(self) -> str | None:
        """The client reads one frame, None when there is none."""
        if not self._outbound:
            return None
        frame = self._outbound.popleft()
        _wake(self._room)
        return frame

    def drop(self) -> None:
        """The connection breaks: what is on its way in either direction is lost."""
        self.is_dropped = True
        self._outbound.clear()
        first = [message for message in self._inbound if message["type"] == "websocket.connect"]
        self._inbound = deque([*first, {"type": "websocket.disconnect", "code": 1006}])
        _wake(self._heard)
        _wake(self._room)

    @property
    def has_room(self) -> bool:
        """Whether the network takes a frame now."""
        return len(self._outbound) < self._capacity or self.is_dropped

    async def find_room(self) -> None:
        """Wait while the network holds all it can, or until the client has read nothing for too
        long, which ends the connection."""
        while not self.has_room:
            self._room = self._loop.create_future()
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._room
            except TimeoutError:
                self.close_code = int(CloseCode.OVERLOADED)
                return

    def send_texts(self, texts: Sequence[bytes]) -> None:
        """Send frames to the client. Raises ClientDisconnected."""
        if self.is_dropped or self.close_code is not None:
            raise ClientDisconnected
        self._outbound.extend(text.decode() for text in texts)

    async def _receive(self) -> Message:
        while not self._inbound:
            self._heard = self._loop.create_future()
            await self._heard
        return self._inbound.popleft()

    async def _send(self, message: Message) -> None:
        match message["type"]:
            case "websocket.close":
                self.close_code = message.get("code", 1000)
            case "websocket.http.response.start":
                self.denied = message["status"]
            case _:
                pass


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
