"""`SessionStore`: find, write and delete the sessions that are on disk."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Final

from session_server.sessions.store.database import Database, Durability
from session_server.sessions.store.records import (
    Damaged,
    LogEntry,
    SessionRow,
    decode_entry,
)
from session_server.sessions.store.writer import CommitCounts, GroupCommits, Told, Write

_logger: Final = logging.getLogger("session_server.store")

_EPOCH_BYTES: Final = 8


class SessionStore:
    """Keep sessions in a directory. Call every method on the event loop's thread.

    `model`: the fingerprint of the tokenizer that token ids are of. `durability`: with "turn" the
    end of a turn waits for its commit, with "relaxed" it does not. `wall_clock` returns seconds
    that go on while no server runs; by default those of this moment and what passes from here on,
    so that a clock that is set while the server runs ends no session.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: bytes,
        durability: Durability = "turn",
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        """Open the store. Raises StoreUnusable."""
        self._database = Database(directory, durability=durability)
        self.model, self.durability = model, durability
        self.wall_clock = wall_clock or _steady_clock()
        self._boot = secrets.token_bytes(_EPOCH_BYTES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commits = GroupCommits(self._database, self._deliver)
        self._dropped: dict[tuple[str, str], int] = {}
        """How many deletions of a session are under way: it may still be found on disk."""

        self.failure: str | None = None
        """Why the last commit failed; None if it did not."""

    @property
    def secret(self) -> bytes:
        """Return random bytes that live as long as the store."""
        return self._database.secret

    @property
    def num_sessions(self) -> int:
        """Return how many sessions are on disk. O(sessions)."""
        return self._database.count()[0]

    @property
    def last_number(self) -> int:
        """Return the highest number of a session on disk, 0 without one."""
        return self._database.count()[1]

    @property
    def counts(self) -> CommitCounts:
        """Return what was written so far."""
        return self._commits.counts

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to write; what was written is told on this loop."""
        self._loop = loop
        self._commits.start()

    async def close(self) -> None:
        """Write what is left, tell of it, and close the store."""
        assert self._loop is not None, "a store that was not started"
        await self._loop.run_in_executor(None, self._commits.stop)
        await asyncio.sleep(0)  # what was delivered last runs before this goes on
        self._database.close()

    async def flush(self) -> None:
        """Wait until all that was asked for is written and told of."""
        assert self._loop is not None, "a store that was not started"
        done = self._loop.create_future()

        def told(_error: Exception | None) -> None:
            if not done.done():
                done.set_result(None)

        self._commits.ask(lambda _database: None, told)
        await done

    # -- reading

    def find(self, owner_id: str, session_id: str) -> SessionRow | None:
        """Return a session that is on disk and has not expired; None if there is none."""
        if (owner_id, session_id) in self._dropped:
            return None
        row = self._database.find(owner_id, session_id)
        return None if row is None or row.expires_s < self.wall_clock() else row

    def page(self, owner_id: str, *, after: int, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions of an owner with higher numbers, in order."""
        now_s = self.wall_clock()
        rows = self._database.page(owner_id, after=after, limit=limit)
        return [
            row
            for row in rows
            if row.expires_s >= now_s and (owner_id, row.session_id) not in self._dropped
        ]

    def expired(self, *, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions whose time has come."""
        rows = self._database.expired(self.wall_clock(), limit=limit)
        return [row for row in rows if (row.owner_id, row.session_id) not in self._dropped]

    def entries(self, row: SessionRow) -> tuple[list[LogEntry], int]:
        """Return the entries of a session, in order, and their bytes. Raises Damaged."""
        found = self._database.entries(row.number)
        if len(found) != row.num_entries:
            raise Damaged(f"{len(found)} entries of {row.num_entries} are there")
        return [decode_entry(data) for data in found], sum(map(len, found))

    def epoch_of(self, number: int) -> str:
        """Return the epoch of a session's journal while this process lives."""
        return blake2b(
            number.to_bytes(8, "little"), key=self._boot, digest_size=_EPOCH_BYTES
        ).hexdigest()

    # -- writing

    def put(self, row: SessionRow, entry: bytes, told: Told) -> None:
        """Write a session in one entry, in place of what is there of it; `told` is called when it
        is on disk, or cannot be."""
        self._ask(partial(_put, row, entry), told)

    def append(self, row: SessionRow, entry: bytes, told: Told) -> None:
        """Write an entry behind the `row.num_entries` that are there; `told` as in `put`."""
        self._ask(partial(_append, row, entry), told)

    def touch(self, row: SessionRow, told: Told) -> None:
        """Write what the row says, but no entry; `told` as in `put`."""
        self._ask(partial(_touch, row), told)

    def delete(
        self, owner_id: str, session_id: str, number: int, told: Told = lambda _error: None
    ) -> None:
        """Delete a session. From now on it is not found; `told` as in `put`."""
        name = owner_id, session_id
        self._dropped[name] = self._dropped.get(name, 0) + 1

        def forget(error: Exception | None) -> None:
            # What could not be deleted is found again in the next process, until it expires.
            if error is None:
                self._dropped[name] -= 1
                if not self._dropped[name]:
                    del self._dropped[name]
            told(error)

        self._ask(partial(_delete, number), forget)

    def _ask(self, write: Write, told: Told) -> None:
        self._commits.ask(write, partial(self._note, told))

    def _note(self, told: Told, error: Exception | None) -> None:
        if error is not None and self.failure is None:
            _logger.error("the store cannot be written to: %s", error)
        elif error is None and self.failure is not None:
            _logger.warning("the store can be written to again")
        self.failure = None if error is None else str(error)
        told(error)

    def _deliver(self, run: Callable[[], None]) -> None:
        assert self._loop is not None, "a store that was not started"
        self._loop.call_soon_threadsafe(run)


def _steady_clock() -> Callable[[], float]:
    ahead_s = time.time() - time.monotonic()
    return lambda: time.monotonic() + ahead_s


def _put(row: SessionRow, entry: bytes, database: Database) -> None:
    database.put(row, entry)


def _append(row: SessionRow, entry: bytes, database: Database) -> None:
    database.append(row, entry)


def _touch(row: SessionRow, database: Database) -> None:
    database.touch(row)


def _delete(number: int, database: Database) -> None:
    database.delete(number)
