"""Bound what the server holds for a peer that does not read it.

A transport keeps every byte that the kernel did not take. Those bytes, and those that wait behind
them, count in the connection table, and a peer that takes none of them for a while is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from session_server.web.connection_table import Connection, ConnectionTable


class UnreadOutput:
    """Count and time the bytes that one peer has not read."""

    __slots__ = (
        "_connection",
        "_num_behind",
        "_on_stall",
        "_stall_s",
        "_table",
        "_timer",
        "_transport",
    )

    def __init__(
        self,
        connection: Connection,
        transport: asyncio.Transport,
        *,
        table: ConnectionTable,
        stall_s: float,
        on_stall: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._table = table
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._num_behind = 0
        self._timer: asyncio.TimerHandle | None = None
        # Call `pause_writing` as soon as the kernel does not take all bytes at once.
        transport.set_write_buffer_limits(high=0)

    def begin(self) -> None:
        """Start to count and wait: the transport has called `pause_writing`."""
        self._watch(self._transport.get_write_buffer_size())

    def end(self) -> None:
        """Stop: the peer has read everything, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._num_behind = 0
            self._count(0)

    def set_behind(self, num_bytes: int) -> None:
        """Count these bytes too, which are written once the peer has read what was."""
        if self._timer is not None:
            self._num_behind = num_bytes
            self._count(self._transport.get_write_buffer_size())

    def _watch(self, num_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._stall_s, self._check, num_bytes)
        self._count(num_bytes)  # last, because the table may evict this connection

    def _count(self, num_bytes: int) -> None:
        self._table.await_reader(self._connection, num_bytes=num_bytes + self._num_behind)

    def _check(self, num_bytes: int) -> None:
        still_unread = self._transport.get_write_buffer_size()
        if still_unread >= num_bytes:
            self._on_stall()
        else:
            self._watch(still_unread)
