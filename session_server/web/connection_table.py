"""Which connections are open, and how many bytes of unfinished messages they hold.

Two scopes are bounded: all connections together, and those of one address. Where a scope is full,
the connection that has kept the server waiting for longest is closed, so that peers who say nothing
or never finish a message cannot keep others out. A connection that is being served is never closed
for another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Connection(Protocol):
    """A connection as the table sees it; hashable by identity."""

    @property
    def address(self) -> str:
        """Where the peer connects from, without its port."""
        ...

    def evict(self) -> None:
        """Close now: another connection needs the room."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds over all connections and per address. `input_bytes` counts unfinished messages."""

    connections: int = 10_256
    connections_per_address: int = 5_128
    input_bytes: int = 64 << 20
    input_bytes_per_address: int = 32 << 20


@dataclass(slots=True)
class _Scope:
    """The connections of one address, or all of them.

    `silent` and `unfinished` are ordered by when each began to keep the server waiting;
    `unfinished` holds the bytes of the message that has not arrived completely.
    """

    max_connections: int
    max_bytes: int
    num_connections: int = 0
    num_bytes: int = 0
    silent: dict[Connection, None] = field(default_factory=dict)
    unfinished: dict[Connection, int] = field(default_factory=dict)


class ConnectionTable:
    """All connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._all = _Scope(limits.connections, limits.input_bytes)
        self._by_address: dict[str, _Scope] = {}
        self._closing: set[Connection] = set()

    @property
    def num_connections(self) -> int:
        """Connections that are open, without those that were shed."""
        return self._all.num_connections

    @property
    def num_input_bytes(self) -> int:
        """Bytes of messages that have not arrived completely."""
        return self._all.num_bytes

    @property
    def num_addresses(self) -> int:
        """Addresses that have a connection open."""
        return len(self._by_address)

    def add(self, connection: Connection) -> bool:
        """Count a new connection, which has said nothing yet.

        Returns False where there is no room and nobody to close for it: tell the newcomer so once
        it has asked. It is counted all the same, and is the next one to be closed, so that at most
        one is open beyond each bound.
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
        """Note that the server waits for nothing from this connection."""
        if connection not in self._closing:
            self._remove_from_waiting(connection)

    def await_input(self, connection: Connection, *, num_bytes: int) -> None:
        """Note that the server waits for this connection, `num_bytes` of whose message are here.

        A connection keeps its place in line from call to call until `serve`. Sheds connections, if
        need be this one, while there are too many bytes.
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
        for scope in scopes:
            while scope.num_bytes > scope.max_bytes:
                self._evict(next(iter(scope.unfinished)))

    def _make_room(self, scope: _Scope) -> bool:
        """Shed who has kept the server waiting for longest if the scope is full."""
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
        if self._by_address[connection.address].num_connections == 0:
            del self._by_address[connection.address]

    def _remove_from_waiting(self, connection: Connection) -> None:
        for scope in self._scopes_of(connection):
            scope.silent.pop(connection, None)
            scope.num_bytes -= scope.unfinished.pop(connection, 0)

    def _scopes_of(self, connection: Connection) -> tuple[_Scope, _Scope]:
        scope = self._by_address.get(connection.address)
        if scope is None:
            limits = self._limits
            scope = _Scope(limits.connections_per_address, limits.input_bytes_per_address)
        return scope, self._all
