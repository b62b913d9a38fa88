"""Count open connections, the bytes of their unfinished messages and of answers they do not read.

Two scopes are bounded: all connections, and those of one address. If a scope is full, the
connection that has kept the server waiting longest is evicted, so that silent peers, unfinished
messages and unread answers cannot keep others out. A connection that is being served and reads its
answers is never evicted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final, Protocol

EVICTED_AT_ONCE: Final = 32
"""Connections evicted in one callback for the bytes of one."""


class Connection(Protocol):
    """Describe a connection as the table sees it; hashable by identity."""

    @property
    def address(self) -> str:
        """Return the peer's address, without its port."""
        ...

    def evict(self) -> None:
        """Close now, to make room for another connection."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bound connections, bytes of unfinished messages and bytes of unread answers, in all and per
    address."""

    connections: int = 10_256
    connections_per_address: int = 5_128
    input_bytes: int = 64 << 20
    input_bytes_per_address: int = 32 << 20
    output_bytes: int = 256 << 20
    output_bytes_per_address: int = 128 << 20


@dataclass(slots=True)
class _Scope:
    """Track the connections of one address, or all of them.

    `silent`, `unfinished` and `unread` are ordered by when each connection began to keep the server
    waiting; `unfinished` maps to the bytes that have arrived of the message, `unread` to the bytes
    that the peer has not read.
    """

    max_connections: int
    max_bytes: int
    max_unread_bytes: int
    num_connections: int = 0
    num_bytes: int = 0
    num_unread_bytes: int = 0
    silent: dict[Connection, None] = field(default_factory=dict)
    unfinished: dict[Connection, int] = field(default_factory=dict)
    unread: dict[Connection, int] = field(default_factory=dict)

    def first_excess(self) -> Connection | None:
        """Return the connection to evict next; None if there are not too many bytes."""
        if self.num_bytes > self.max_bytes:
            return next(iter(self.unfinished))
        if self.num_unread_bytes > self.max_unread_bytes and len(self.unread) > 1:
            return next(iter(self.unread))
        return None


class ConnectionTable:
    """Track all connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._all = _Scope(limits.connections, limits.input_bytes, limits.output_bytes)
        self._by_address: dict[str, _Scope] = {}
        self._closing: set[Connection] = set()

    @property
    def num_connections(self) -> int:
        """Return the number of open connections, without evicted ones."""
        return self._all.num_connections

    @property
    def num_input_bytes(self) -> int:
        """Return the bytes of messages that have not arrived completely."""
        return self._all.num_bytes

    @property
    def num_unread_bytes(self) -> int:
        """Return the bytes of answers that peers have not read."""
        return self._all.num_unread_bytes

    @property
    def num_addresses(self) -> int:
        """Return the number of addresses with an open connection."""
        return len(self._by_address)

    def add(self, connection: Connection) -> bool:
        """Count a new connection that has sent nothing yet.

        Return False if there is no room and no waiting connection to evict. The caller then refuses
        the new one after reading its request. It is counted all the same, and is the next one to be
        evicted, so that at most one connection is open beyond each bound.
        """
        scopes = self._scopes_of(connection)
        has_room = True
        for scope in scopes:
            has_room = self._make_room(scope) and has_room
        for scope in scopes:
            scope.num_connections += 1
            scope.silent[connection] = None
        self._by_address[connection.address] = scopes[0]
        return has_room

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is gone."""
        if connection in self._closing:
            self._closing.remove(connection)
        else:
            self._discard(connection)

    def mark_served(self, connection: Connection) -> None:
        """Mark that the server waits for nothing from this connection."""
        if connection not in self._closing:
            self._remove_from_waiting(connection)

    def await_input(self, connection: Connection, *, num_bytes: int) -> None:
        """Mark that the server waits for the rest of a message, and that `num_bytes` are here.

        A connection keeps its place in the eviction order until `mark_served`. While there are too
        many bytes, the connections that have waited longest are evicted, this one included.
        """
        if connection in self._closing:
            return
        scopes = self._scopes_of(connection)
        for scope in scopes:
            if num_bytes == 0 and connection not in scope.unfinished:
                scope.silent.setdefault(connection)
                continue
            scope.silent.pop(connection, None)
            scope.num_bytes += num_bytes - scope.unfinished.get(connection, 0)
            scope.unfinished[connection] = num_bytes
        self._evict_excess(scopes)

    def await_reader(self, connection: Connection, *, num_bytes: int) -> None:
        """Mark that the peer has `num_bytes` to read; 0: it has read everything.

        While there are too many bytes, the connections that have waited longest are evicted, this
        one included. One answer may be larger than the bound, if no other is unread.
        """
        if connection in self._closing:
            return
        scopes = self._scopes_of(connection)
        for scope in scopes:
            scope.num_unread_bytes += num_bytes - scope.unread.get(connection, 0)
            scope.unread[connection] = num_bytes
            if num_bytes == 0:
                del scope.unread[connection]
        self._evict_excess(scopes)

    def _evict_excess(self, scopes: tuple[_Scope, _Scope]) -> None:
        """Evict while there are too many bytes; those beyond `EVICTED_AT_ONCE` come next."""
        of_address, of_all = scopes
        for _ in range(EVICTED_AT_ONCE):
            connection = of_address.first_excess() or of_all.first_excess()
            if connection is None:
                return
            self._evict(connection)
        asyncio.get_running_loop().call_soon(self._evict_excess, scopes)

    def _make_room(self, scope: _Scope) -> bool:
        """Evict the connection that has kept the server waiting longest if the scope is full."""
        waiting = scope.silent or scope.unfinished
        if scope.num_connections >= scope.max_connections and waiting:
            self._evict(next(iter(waiting)))
        return scope.num_connections < scope.max_connections

    def _evict(self, connection: Connection) -> None:
        self._discard(connection)
        self._closing.add(connection)
        connection.evict()

    def _discard(self, connection: Connection) -> None:
        self._remove_from_waiting(connection)
        for scope in self._scopes_of(connection):
            scope.num_connections -= 1
            scope.num_unread_bytes -= scope.unread.pop(connection, 0)
        if self._by_address[connection.address].num_connections == 0:
            del self._by_address[connection.address]

    def _remove_from_waiting(self, connection: Connection) -> None:
        for scope in self._scopes_of(connection):
            scope.silent.pop(connection, None)
            scope.num_bytes -= scope.unfinished.pop(connection, 0)

    def _scopes_of(self, connection: Connection) -> tuple[_Scope, _Scope]:
        scope = self._by_address.get(connection.address)
        if scope is None:
            limits = self.limits
            scope = _Scope(
                limits.connections_per_address,
                limits.input_bytes_per_address,
                limits.output_bytes_per_address,
            )
        return scope, self._all
