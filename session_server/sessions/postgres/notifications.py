"""Hear what other replicas ask for, and what they give up: notifications of PostgreSQL."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from session_server.sessions.postgres.connections import PostgresConnection, connect
from session_server.sessions.store.ownership import LeaseLost

RELEASED: Final = "session_server_released"
"""Where all hear of sessions that nobody holds any more: their numbers."""

_SLICE_S: Final = 0.25
"""How long one look for notifications takes: so long does `close` wait."""


_PROBE_S: Final = 5.0
"""How often a connection over which nothing is heard is asked whether it still works."""


def channel_of(replica_id: int) -> str:
    """Return where a replica hears of sessions that others ask of it, each by its number."""
    return f"session_server_asked_{replica_id}"


class Notifications:
    """Listen over one connection, for any number of threads: one of those that wait reads it, and
    the others are told what it has heard."""

    def __init__(self, conninfo: str, replica_id: int) -> None:
        self._conninfo, self._channel = conninfo, channel_of(replica_id)
        self._changed = threading.Condition()
        self._connection: PostgresConnection | None = None
        self._is_read = self._is_closed = False
        self._probed_s = 0.0
        self._asked: list[int] = []
        self._awaited: Counter[int] = Counter()
        self._released: set[int] = set()
        """Those of the awaited that may be free."""

    def asked(self, timeout_s: float) -> list[int]:
        """Return what was asked of this replica, in order, each session once; after that time
        nothing. Raises LeaseLost, psycopg.Error."""
        with self._changed:
            self._listen()
            self._wait(lambda: bool(self._asked), timeout_s)
            asked, self._asked = self._asked, []
        return list(dict.fromkeys(asked))

    def await_release(self, number: int, is_free: Callable[[], bool], timeout_s: float) -> bool:
        """Return whether a session may be free, as soon as it may, and else after that time. Raises
        LeaseLost, psycopg.Error, and what `is_free` raises."""
        with self._changed:
            self._listen()
            self._awaited[number] += 1
            try:
                self._changed.release()
                try:
                    if is_free():  # since before anybody listened
                        return True
                finally:
                    self._changed.acquire()
                return self._wait(lambda: number in self._released, timeout_s)
            finally:
                self._awaited[number] -= 1
                if not self._awaited[number]:
                    del self._awaited[number]
                    self._released.discard(number)

    def close(self) -> None:
        """Have nobody wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            while self._is_read:
                self._changed.wait()
            self._disconnect()

    def _wait(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something is there, and return whether it is; called and returns locked."""
        until_s = time.monotonic() + timeout_s
        while not is_there():
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self._is_closed:
                return False
            if self._is_read:
                self._changed.wait(left_s)
            else:
                self._hear(self._listen(), min(left_s, _SLICE_S))
        return True

    def _hear(self, connection: PostgresConnection, timeout_s: float) -> None:
        """Read what has been said; the lock is free meanwhile."""
        self._is_read = True
        self._changed.release()
        heard, is_broken = [], True
        try:
            if time.monotonic() > self._probed_s + _PROBE_S:
                connection.execute("SELECT")  # what is heard meanwhile is kept
                self._probed_s = time.monotonic()
            heard = list(connection.notifies(timeout=timeout_s, stop_after=1))
            is_broken = False
        finally:
            self._changed.acquire()
            self._is_read = False
            if is_broken:
                self._disconnect()
            for each in heard:
                numbers = [int(number) for number in each.payload.split(",")]
                if each.channel == RELEASED:
                    self._released.update(self._awaited.keys() & numbers)
                else:
                    self._asked += numbers
            self._changed.notify_all()

    def _listen(self) -> PostgresConnection:
        """Return the connection, which is made if there is none, while others wait for it. Raises
        LeaseLost once it is closed, psycopg.Error."""
        if self._is_closed:
            raise LeaseLost("this replica has left")
        if self._connection is None:
            connection = connect(self._conninfo)
            try:
                connection.execute(f'LISTEN "{self._channel}"; LISTEN "{RELEASED}"')
            except BaseException:
                connection.close()
                raise
            self._connection = connection
            # What was said before that nobody has heard: they look again.
            self._released.update(self._awaited)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
