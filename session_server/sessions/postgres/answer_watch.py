"""`AnswerWatch`: end connections on which an answer is awaited for too long.

PostgreSQL bounds its statements itself, but not its commits: one that waits for a standby waits for
ever, and so does whoever has asked a server that is frozen, while its system goes on to acknowledge
what is sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Final

import psycopg

from session_server.sessions.postgres.connections import Connection

_logger: Final = logging.getLogger("session_server.store")

_LOOK_S: Final = 0.5


class AnswerWatch:
    """Watch connections on a thread of its own, until it is closed."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[float, Connection]] = {}
        """Until when an answer is awaited, by the connection."""

        self._lock = threading.Lock()
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="store-answers", daemon=True).start()

    @contextlib.contextmanager
    def watch(self, connection: Connection, wait_s: float) -> Iterator[None]:
        """Have whoever waits for a connection in this block fail after that time, or a little
        later, as if the network had broken: with psycopg.OperationalError."""
        with self._lock:
            self._watched[id(connection)] = (time.monotonic() + wait_s, connection)
        try:
            yield
        finally:
            with self._lock:
                del self._watched[id(connection)]

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            with self._lock:
                now_s = time.monotonic()
                overdue = [each for until_s, each in self._watched.values() if until_s < now_s]
                for connection in overdue:
                    _break(connection)


def _break(connection: Connection) -> None:
    """Have both ends of a connection see its end; whoever waits for it closes it."""
    with contextlib.suppress(OSError, psycopg.Error):  # it has ended just now
        with socket.socket(fileno=os.dup(connection.fileno())) as shared:
            shared.shutdown(socket.SHUT_RDWR)
        _logger.error("PostgreSQL has not answered in time: the connection is given up")
