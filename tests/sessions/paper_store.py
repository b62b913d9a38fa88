"""A store on a real database without a thread: it writes when asked, or when told to."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from session_server.sessions.store.clock import StoreClock
from session_server.sessions.store.database import Database
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.store.writer import Told, Write


def count(database: Database) -> tuple[int, int]:
    """Return how many sessions a store has, and the highest number."""
    query = "SELECT count(*), coalesce(max(number), 0) FROM sessions"
    num_sessions, last = database._reader.execute(query).fetchone()
    return num_sessions, last


class PaperStore(SessionStore):
    """`is_slow`: `tell` writes, and tells. `fails`: the disk is full. What was not told of when the
    process ends has not been written. `trusts`: what the wall clock says at the start is believed
    at once, as if it had been noted just before."""

    def __init__(
        self,
        directory: Path,
        wall: Callable[[], float],
        *,
        clock: Callable[[], float] | None = None,
        model: bytes = b"tokenizer",
        trusts: bool = True,
    ) -> None:
        clock = clock or wall
        database = Database(directory, durability="relaxed")
        database.lock.serve()
        super().__init__(database, model=model, durability="relaxed", wall=wall, clock=clock)
        if trusts:
            self.clock = StoreClock(wall(), wall=wall, clock=clock)
        self.durability = "turn"
        self.is_slow = self.fails = False
        self._untold: deque[Callable[[], None]] = deque()

    @property
    def num_untold(self) -> int:
        """Writes that are still to come."""
        return len(self._untold)

    def tell(self, limit: int | None = None) -> None:
        """Write, and tell of it."""
        num_left = -1 if limit is None else limit
        while self._untold and num_left:  # whoever is told may write again
            num_left -= 1
            self._untold.popleft()()

    def finish(self) -> None:
        """Close it, as the end of a process does."""
        self._database.close()

    async def flush(self) -> None:
        """Write what there is now; what that brings about comes later."""
        self.tell(len(self._untold))

    def _ask(self, write: Write, told: Told, *, num_bytes: int) -> None:
        self._untold.append(partial(self._write, write, told))
        if not self.is_slow:
            self.tell()

    def _ask_to_delete(self, write: Write, written: Told, told: Told, *, is_urgent: bool) -> None:
        def tell(error: Exception | None) -> None:
            written(error)
            told(error)

        self._ask(write, tell, num_bytes=0)

    def _write(self, write: Write, told: Told) -> None:
        error: Exception | None = None
        try:
            with self._database.transaction():
                if self.fails:
                    raise sqlite3.OperationalError("database or disk is full")
                write(self._database)
        except Exception as caught:  # noqa: BLE001 - as `GroupCommits` does
            error = caught
        self._note(told, error)
