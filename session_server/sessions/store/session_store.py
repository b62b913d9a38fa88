"""`SessionStore`: find, write and delete the sessions that are on disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from session_server.sessions.store.database import Behind, Database, Durability
from session_server.sessions.store.records import (
    Damaged,
    LogEntry,
    Parts,
    RecordRow,
    SessionRow,
    decode_entry,
)
from session_server.sessions.store.survey import SurveyAnswer, SurveyQuestion, survey
from session_server.sessions.store.writer import (
    Beside,
    CommitCounts,
    GroupCommits,
    Told,
    Write,
    together,
)

_logger: Final = logging.getLogger("session_server.store")

CLOSE_WAIT_S: Final = 5.0
"""How long the end of a server waits for its disk."""

DISK_WAIT_S: Final = 10.0
"""How long a write may take before it counts as failed."""

MAX_WAITING_BYTES: Final = 64 << 20
"""Entries that wait for the disk; a further write fails. One session has one write under way."""

ENTRIES_AT_ONCE: Final = 16
"""Entries that are read before others are served: a millisecond or two."""

_DELETED_AT_ONCE: Final = 64
_NO_ANSWER: Final = "the disk does not answer"


class SessionStore:
    """Keep sessions in a directory. Call every method on the event loop's thread.

    `model`: the `ModelText.fingerprint` that token ids are of. `durability`: with "turn" the
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
        self.directory = directory
        self.model, self.durability = model, durability
        self.wall_clock = wall_clock or _steady_clock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commits = GroupCommits(self._database, self._deliver)
        self._num_waiting = 0
        self._dropped: set[int] = set()
        """Numbers of sessions that are being deleted: they may still be found on disk."""

        self._undeleted: dict[int, None] = {}
        """Those of them that could not be deleted yet."""

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

    def census(self) -> str:
        """Say how many sessions are on disk, those that have expired apart. O(sessions)."""
        num_open, num_expired = self._database.census(self.wall_clock())
        return f"{num_open}, and {num_expired} that have expired" if num_expired else f"{num_open}"

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
        """Write what is left, tell of it, and close the store. After `CLOSE_WAIT_S` it is left to a
        disk that does not answer."""
        assert self._loop is not None, "a store that was not started"
        is_over = await self._loop.run_in_executor(None, self._commits.stop, CLOSE_WAIT_S)
        await asyncio.sleep(0)  # what was delivered last runs before this goes on
        if is_over:
            self._database.close()
        else:
            _logger.error("the store was not closed: the disk does not answer")

    async def flush(self) -> None:
        """Wait until all that was asked for is written and told of, or could not be."""
        assert self._loop is not None, "a store that was not started"
        done = self._loop.create_future()

        def told(_error: Exception | None) -> None:
            if not done.done():
                done.set_result(None)

        self._commits.ask(None, told)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISK_WAIT_S):
                await done

    # -- reading

    def find(self, owner_id: str, session_id: str) -> SessionRow | None:
        """Return a session that is on disk and has not expired; None if there is none. Raises
        sqlite3.Error."""
        return self._if_open(self._database.find(owner_id, session_id))

    def numbered(self, number: int) -> SessionRow | None:
        """Return the session of a number, as `find` does. Raises sqlite3.Error."""
        return self._if_open(self._database.numbered(number))

    def _if_open(self, row: SessionRow | None) -> SessionRow | None:
        if row is None or row.number in self._dropped or row.expires_s < self.wall_clock():
            return None
        return row

    async def survey(self, question: SurveyQuestion) -> SurveyAnswer:
        """Look through all sessions on disk, on another thread. Raises sqlite3.Error."""
        without = question.without | self._dropped
        asked = replace(question, now_s=self.wall_clock(), without=without)
        return await asyncio.to_thread(survey, self._database.path, asked)

    def page(self, owner_id: str, *, after: int, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions of an owner with higher numbers, in order; fewer only if
        there are no more. Raises sqlite3.Error."""
        now_s, found = self.wall_clock(), list[SessionRow]()
        while len(found) < limit:
            rows = self._database.page(owner_id, after=after, now_s=now_s, limit=limit)
            found += [row for row in rows if row.number not in self._dropped]
            if len(rows) < limit:
                break
            after = rows[-1].number
        return found[:limit]

    def holdings(self) -> list[tuple[str, int, int]]:
        """Return how many sessions each owner has on disk, and their bytes. O(entries)."""
        return self._database.holdings()

    def num_bytes(self, row: SessionRow) -> int:
        """Return the bytes of a session on disk. Raises sqlite3.Error."""
        return self._database.num_bytes(row.number)

    def expired(self, *, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions whose time has come. Raises sqlite3.Error."""
        num_dropped = len(self._dropped)
        rows = self._database.expired(self.wall_clock(), limit=limit + num_dropped)
        return [row for row in rows if row.number not in self._dropped][:limit]

    def slices(self, row: SessionRow) -> Iterator[tuple[list[LogEntry], int]]:
        """Yield the entries of a session, in order, some at a time with their bytes. Raises
        Damaged, sqlite3.Error."""
        num_read = 0
        while True:
            found = self._database.entries(row.number, start=num_read, limit=ENTRIES_AT_ONCE)
            num_read += len(found)
            is_last = len(found) < ENTRIES_AT_ONCE
            if num_read > row.num_entries or (is_last and num_read < row.num_entries):
                raise Damaged(f"{num_read} entries of {row.num_entries} are there")
            yield [decode_entry(data) for data in found], sum(map(len, found))
            if is_last:
                return

    def records(self) -> list[RecordRow]:
        """Return all records, that first which was not written for longest. Raises
        sqlite3.Error."""
        return self._database.records()

    def parts(self, number: int) -> Parts:
        """Return the parts of a record, in order. Raises sqlite3.Error."""
        return self._database.parts(number)

    # -- writing

    def put(self, row: SessionRow, entry: bytes, told: Told, beside: Beside | None = None) -> None:
        """Write a session in one entry, in place of what is there of it; `told` is called when it
        is on disk, or cannot be. `beside`: in the same commit."""
        self.ask(lambda database: database.put(row, entry), told, len(entry), beside)

    def append(
        self, row: SessionRow, entry: bytes, told: Told, beside: Beside | None = None
    ) -> None:
        """Write an entry behind the `row.num_entries` that are there; the others as in `put`."""
        self.ask(lambda database: database.append(row, entry), told, len(entry), beside)

    def touch(self, row: SessionRow, told: Told) -> None:
        """Write what the row says, but no entry; `told` as in `put`."""
        self.ask(lambda database: database.touch(row), told)

    def delete(self, number: int, told: Told = lambda _error: None) -> None:
        """Delete a session. From now on it is not found; `told` as in `put`. Where that fails it is
        tried again."""
        self._end(number, told, lambda database: database.delete(number))

    def retire(self, number: int, told: Told = lambda _error: None) -> None:
        """Delete a session whose tokens are still to be read: from now on it is not found, and once
        that is on disk it is one that has expired; `told` as in `put`. Where that fails it is
        deleted."""
        self._end(number, told, lambda database: database.retire(number))

    def retry_deletes(self) -> None:
        """Delete what could not be deleted: one session, and more once that succeeds."""
        num_tried = 1 if self.failure is not None else _DELETED_AT_ONCE
        for number in list(islice(self._undeleted, num_tried)):
            del self._undeleted[number]
            self.delete(number)

    @property
    def num_undeleted(self) -> int:
        """Return the sessions that are to be deleted, and could not be."""
        return len(self._undeleted)

    def _end(self, number: int, told: Told, write: Write) -> None:
        self._dropped.add(number)

        def forget(error: Exception | None) -> None:
            if error is None:
                self._dropped.discard(number)
            else:
                self._undeleted[number] = None
            told(error)

        self.ask(write, forget)

    def ask(
        self, write: Write, told: Told, num_bytes: int = 0, beside: Beside | None = None
    ) -> None:
        """Have something written, of so many bytes; `told` and `beside` as in `put`. A disk that
        does not answer, or has too much to write, fails it: nobody waits for ever. What it writes
        later is as if it had been told of."""
        if beside is not None:
            write, told, num_bytes = together((beside, Beside(write, told, num_bytes)))
        self._ask(write, told, num_bytes=num_bytes)

    def _ask(self, write: Write, told: Told, *, num_bytes: int) -> None:
        assert self._loop is not None, "a store that was not started"
        if self._num_waiting + num_bytes > MAX_WAITING_BYTES:
            self._loop.call_soon(self._note, told, sqlite3.OperationalError(_NO_ANSWER))
            return
        self._num_waiting += num_bytes
        is_told = False

        def tell(error: Exception | None) -> None:
            nonlocal is_told
            if not is_told:
                is_told = True
                timer.cancel()
                self._note(told, error)

        def written(error: Exception | None) -> None:
            self._num_waiting -= num_bytes
            tell(error)

        error = sqlite3.OperationalError(_NO_ANSWER)
        timer = self._loop.call_later(DISK_WAIT_S, tell, error)
        self._commits.ask(write, written)

    def _note(self, told: Told, error: Exception | None) -> None:
        # A log that lacks something is no fault of the disk: its session is written again.
        failure = None if error is None or isinstance(error, Behind) else str(error)
        if failure is not None and self.failure is None:
            _logger.error("the store cannot be written to: %s", failure)
        elif failure is None and self.failure is not None:
            _logger.warning("the store can be written to again")
        self.failure = failure
        told(error)

    def _deliver(self, run: Callable[[], None]) -> None:
        assert self._loop is not None, "a store that was not started"
        with contextlib.suppress(RuntimeError):  # nobody is left to tell: a disk has hung
            self._loop.call_soon_threadsafe(run)


def _steady_clock() -> Callable[[], float]:
    ahead_s = time.time() - time.monotonic()
    return lambda: time.monotonic() + ahead_s
