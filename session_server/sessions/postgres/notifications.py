"""Hear what other replicas ask for: notifications of PostgreSQL."""

from __future__ import annotations

import time
from typing import Final

from session_server.sessions.postgres.connections import KeptConnection, PostgresConnection
from session_server.sessions.store.ownership import LeaseLost

_SLICE_S: Final = 0.25
"""How long one look for notifications takes: so long somebody listens behind `close`."""

_PROBE_S: Final = 5.0
"""How often a connection over which nothing is heard is asked whether it still works."""

_LAST_NUMBER: Final = 2**63 - 1


def channel_of(replica_id: int) -> str:
    """Return where a replica hears of sessions that others ask of it, each by its number."""
    return f"session_server_asked_{replica_id}"


class Notifications:
    """Listen over one connection. One thread at a time asks, and any may `close`."""

    def __init__(self, conninfo: str, replica_id: int) -> None:
        self._kept = KeptConnection(conninfo, f'LISTEN "{channel_of(replica_id)}"')
        self._probed_s = 0.0

    def asked(self, timeout_s: float) -> list[int]:
        """Return what was asked of this replica, in order, each session once; after that time
        nothing. Raises LeaseLost once this is closed, psycopg.Error."""
        until_s = time.monotonic() + timeout_s
        if self._kept.is_closed:
            raise LeaseLost("this replica has left")
        with self._kept.lent() as connection:
            numbers = self._hear(connection, until_s)
            while not (numbers or self._kept.is_closed or time.monotonic() >= until_s):
                numbers = self._hear(connection, until_s)
        # What is asked of one whose lease is over is not asked of the one that has joined since.
        return [] if self._kept.is_closed else numbers

    def close(self) -> None:
        """Have nobody listen any more. Waits for nothing: whoever listens stops soon."""
        self._kept.close()

    def _hear(self, connection: PostgresConnection, until_s: float) -> list[int]:
        """Return what has been said within a slice of the time."""
        if time.monotonic() > self._probed_s + _PROBE_S:
            connection.execute("SELECT")  # what is heard meanwhile is kept
            self._probed_s = time.monotonic()
        wait_s = max(0.0, min(until_s - time.monotonic(), _SLICE_S))
        heard = list(connection.notifies(timeout=wait_s, stop_after=1))
        return list(dict.fromkeys(number for each in heard for number in _numbers(each.payload)))


def _numbers(payload: str) -> list[int]:
    """Return the number that somebody asks for. Any client of the database may say something else
    there, which is nothing."""
    if not (payload.isascii() and payload.isdigit() and len(payload) <= len(str(_LAST_NUMBER))):
        return []
    number = int(payload)
    return [number] if number <= _LAST_NUMBER else []
