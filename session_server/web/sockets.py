"""Track live WebSockets: bounded in number, and at most one of those that are about one session."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Final, Protocol

from session_server.core.errors import ServerBusy
from session_server.core.owner import Owner
from session_server.protocol.session_protocol import CloseCode

UNAUTHENTICATED_SHARE: Final = 10
"""Of so many connections one may be unauthenticated, so that clients without a key cannot keep
others out."""

ENDED_AT_ONCE: Final = 32
"""Sockets ended before others are served: each wakes a task that says goodbye."""


class AttachedSocket(Protocol):
    """Name what `Sockets` asks of a session's WebSocket."""

    def end(self, code: CloseCode) -> None:
        """Close the connection with this code."""


class Sockets:
    """Track all WebSockets of one server."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._num_open: Counter[str] = Counter()
        self._by_session: dict[tuple[Owner, str], AttachedSocket] = {}
        self._joined: set[AttachedSocket] = set()

    def admit(self) -> contextlib.AbstractContextManager[None]:
        """Count one connection inside the block. Raises ServerBusy."""
        return self._admit("are open", self._max_connections)

    def admit_unauthenticated(self) -> contextlib.AbstractContextManager[None]:
        """Count one connection without a key inside the block. Raises ServerBusy."""
        most = max(1, self._max_connections // UNAUTHENTICATED_SHARE)
        return self._admit("have not shown a key", most)

    @contextlib.contextmanager
    def _admit(self, what: str, most: int) -> Iterator[None]:
        if self._num_open[what] >= most:
            raise ServerBusy(f"{self._num_open[what]} connections {what}, the maximum.")
        self._num_open[what] += 1
        try:
            yield
        finally:
            self._num_open[what] -= 1

    def supersede(self, owner: Owner, session_id: str) -> None:
        """Close the session's connection with 4409, if there is one. It gives its place back at
        once, so that a client may come back before the server knows that it has gone."""
        before = self._by_session.get((owner, session_id))
        if before is not None:
            before.end(CloseCode.SUPERSEDED)

    @contextlib.contextmanager
    def attach(self, owner: Owner, session_id: str, socket: AttachedSocket) -> Iterator[None]:
        """Be the session's connection inside the block; close the previous one with 4409."""
        # Two owners may choose the same session id.
        key = (owner, session_id)
        self.supersede(owner, session_id)
        self._by_session[key] = socket
        try:
            yield
        finally:
            if self._by_session.get(key) is socket:
                del self._by_session[key]

    @contextlib.contextmanager
    def join(self, socket: AttachedSocket) -> Iterator[None]:
        """Be a connection of no one session inside the block."""
        self._joined.add(socket)
        try:
            yield
        finally:
            self._joined.remove(socket)

    async def end_all(self, code: CloseCode) -> None:
        """Close every connection with this code, in slices."""
        sockets = [*self._by_session.values(), *self._joined]
        for number, socket in enumerate(sockets, start=1):
            socket.end(code)
            if number % ENDED_AT_ONCE == 0:
                await asyncio.sleep(0)

    @property
    def num_attached(self) -> int:
        """Return the number of connections that serve sessions now."""
        return len(self._by_session) + len(self._joined)
