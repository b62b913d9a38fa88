"""`SessionStore`: find, write and delete the sessions that are on disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, Self

from session_server.sessions.bugs import log_bug
from session_server.sessions.store.backend import StoreDatabase, StoreVerbs
from session_server.sessions.store.clock import EARLIEST_S, GRACE_S, StoreClock
from session_server.sessions.store.database import Behind, Database, Durability
from session_server.sessions.store.deletions import Deletions
from session_server.sessions.store.disk_health import DiskHealth
from session_server.sessions.store.lease import ReplicaLease
from session_server.sessions.store.lock import StoreIsBusy
from session_server.sessions.store.ownership import LeaseLost, NotOurs
from session_server.sessions.store.patience import NO_ANSWER, Patience
from session_server.sessions.store.pieces import MAX_ENTRY_BYTES, LargeEntry
from session_server.sessions.store.records import (
    LAST_S,
    Damaged,
    Holding,
    LogEntry,
    Parts,
    RecordRow,
    SessionRow,
    decode_entry,
)
from session_server.sessions.store.survey import SurveyAnswer, SurveyQuestion
from session_server.sessions.store.writer import (
    Beside,
    CommitCounts,
    GroupCommits,
    Told,
    Write,
    tell_each,
    tell_nobody,
    together,
)

_logger: Final = logging.getLogger("session_server.store")

CLOSE_WAIT_S: Final = 5.0
"""How long the end of a server waits for its disk."""

MAX_WAITING_BYTES: Final = 64 << 20
"""Entries that wait for the disk. A further write fails; one alone is written however large it is,
and one session has one under way."""

MAX_COUNTED: Final = 10_000
"""Sessions that are counted which a wall clock that is ahead would end."""

_TOO_MUCH: Final = "too much waits to be written"

ENTRIES_AT_ONCE: Final = 16
"""Entries that are read before others are served: a millisecond or two."""

PARTS_AT_ONCE: Final = 256
"""Parts of a record that are read before others are served: items of a conversation."""

BYTES_AT_ONCE: Final = MAX_ENTRY_BYTES
"""Of entries or parts: none is read behind one with which they have as many."""

SHARED_ENTRIES: Final = 256
SHARED_BYTES: Final = 1 << 20
"""As many where each question takes the way to another machine; on a thread."""

_Entries = Sequence[bytes] | LargeEntry


class SessionStore:
    """Keep sessions in a database. Call every method on the event loop's thread.

    `model`: the `ModelText.fingerprint` that token ids are of. `durability`: with "turn" the
    end of a turn waits for its commit, with "relaxed" it does not. `wall` returns seconds that go
    on while no server runs, and may be set; `clock` monotonic ones. See `StoreClock`. `lease`: of
    this replica, where others keep sessions in the same database.
    """

    def __init__(
        self,
        database: StoreDatabase,
        *,
        model: bytes,
        durability: Durability = "turn",
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        lease: ReplicaLease | None = None,
    ) -> None:
        self._database, self.lease = database, lease
        self.model, self.durability = model, durability
        since_s = self._database.noted_s()
        if since_s is None:
            is_old = self.lease is None and self.last_number
            since_s = EARLIEST_S if is_old else wall()
        self.clock = StoreClock(since_s, wall=wall, clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._commits = GroupCommits(self._database, self._deliver)
        self._num_waiting = 0
        self._patience = Patience()
        self.deletions = Deletions(self._ask_to_delete)
        self.health = DiskHealth(database.place, database.explain)

    @classmethod
    def in_directory(
        cls,
        directory: Path,
        *,
        model: bytes,
        durability: Durability = "turn",
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Open the store of one server. Raises StoreUnusable, StoreIsBusy."""
        database = Database(directory, durability=durability)
        try:
            database.lock.serve()
        except StoreIsBusy:
            database.close()
            raise
        return cls(database, model=model, durability=durability, wall=wall, clock=clock)

    @property
    def replica_id(self) -> int:
        """Return which replica this is, another one with each lease; 0 where there are none."""
        return 0 if self.lease is None else self.lease.database.replica_id

    @property
    def failure(self) -> str | None:
        """Return why the disk fails, or this replica has no lease; None if it can be used."""
        return self.health.failure or (None if self.lease is None else self.lease.failure)

    @property
    def directory(self) -> Path | None:
        """Return where it is on disk, if it is a directory."""
        return self._database.directory

    @property
    def place(self) -> str:
        """Return where it is, as an operator is told."""
        return self._database.place

    @property
    def read_errors(self) -> tuple[type[Exception], ...]:
        """Return what reads raise where the disk or the database is at fault."""
        return self._database.read_errors

    @property
    def is_shared(self) -> bool:
        """Return whether other replicas keep sessions there too."""
        return self.lease is not None

    @property
    def is_synced(self) -> bool:
        """Return whether what is told to be written is on disk. Else only the system has it, and
        nothing is told to be durable."""
        return self.durability == "turn"

    @property
    def secret(self) -> bytes:
        """Return random bytes that live as long as the store."""
        return self._database.secret

    def census(self) -> str:
        """Say how many sessions are on disk, those that have expired apart. O(sessions)."""
        num_open, num_expired = self._database.census(self.clock.now_s())
        return f"{num_open}, and {num_expired} that have expired" if num_expired else f"{num_open}"

    @property
    def last_number(self) -> int:
        """Return the highest number of a session on disk, 0 without one."""
        return self._database.last_number()

    @property
    def counts(self) -> CommitCounts:
        """Return what was written so far."""
        return self._commits.counts

    def watch_clock(self) -> None:
        """Find out whether the wall clock is believed, and log where that is over; call it now and
        then. Raises sqlite3.Error."""
        ahead_s = self.clock.watch()
        if self.is_shared:
            return  # the time is the database's
        if ahead_s < 0.0:
            _logger.warning(
                "the wall clock says %s, %.0f s before the last time that a server of this store "
                "has seen: sessions on disk age by the time that a server runs alone until it is "
                "set right",
                _shown(self.clock.now_s() + ahead_s),
                -ahead_s,
            )
        elif ahead_s > 0.0:
            since_s = self.clock.now_s()
            try:
                num = self._database.num_expiring(since_s, since_s + ahead_s, limit=MAX_COUNTED)
            except sqlite3.Error:
                self.clock.doubt_anew()
                raise
            if num:
                _logger.warning(
                    "the wall clock says %s, %.0f s more than a server has seen pass: %s%d "
                    "sessions on disk have expired by that. They are deleted in %.0f s unless "
                    "they are used; if the clock is wrong, set it: nothing is deleted yet",
                    _shown(since_s + ahead_s),
                    ahead_s,
                    "at least " if num == MAX_COUNTED else "",
                    num,
                    GRACE_S,
                )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to write; what was written is told on this loop."""
        self._loop = loop
        self._commits.start()
        if self.lease is not None:
            self.lease.start(loop)

    async def close(self) -> None:
        """Write what is left, tell of it, and close the store. After `CLOSE_WAIT_S` it is left to a
        disk that does not answer."""
        assert self._loop is not None, "a store that was not started"
        if self.clock.must_note():
            self._commits.ask(_noting(None, self.clock.noted_s), tell_nobody)
        is_over = await self._loop.run_in_executor(None, self._commits.stop, CLOSE_WAIT_S)
        await asyncio.sleep(0)  # what was delivered last runs before this goes on
        if self.lease is not None:
            await self.lease.stop(leaves=is_over)
        if is_over:
            self._database.close()
        else:
            _logger.error("the store was not closed: the disk does not answer")
            self.health.note_write(TimeoutError(NO_ANSWER))

    def has_lost(self, num_behind: int) -> bool:
        """Return whether a server ends with what its store does not have, and log that, once the
        store is closed. `num_behind`: sessions and records whose last write has failed."""
        why = self.health.unwritten
        if num_behind == 0 and why is None:
            return False
        _logger.error(
            "lost with this process: what is not on disk in %s of %s sessions, responses and "
            "conversations: %s",
            self.place,
            num_behind or "some",
            why or "some of it could not be written",
        )
        return True

    async def flush(self) -> None:
        """Wait until all that was asked for is written and told of, or could not be; but not what
        nobody waits for."""
        assert self._loop is not None, "a store that was not started"
        done = self._loop.create_future()

        def told(_error: Exception | None) -> None:
            if not done.done():
                done.set_result(None)

        self._commits.ask(None, self._patience.wait(self._loop, told))
        await done

    # -- reading

    def find(self, owner_id: str, session_id: str) -> SessionRow | None:
        """Return a session that is on disk and has not expired; None if there is none. Raises
        sqlite3.Error."""
        return self.if_open(self._database.find(owner_id, session_id))

    def numbered(self, number: int) -> SessionRow | None:
        """Return the session of a number, as `find` does. Raises sqlite3.Error."""
        return self.if_open(self._database.numbered(number))

    def if_open(self, row: SessionRow | None) -> SessionRow | None:
        """Return a session that was found, unless it has expired or is being deleted."""
        if row is None or row.number in self.deletions.hidden or row.expires_s < self.clock.now_s():
            return None
        return row

    async def survey(self, question: SurveyQuestion) -> SurveyAnswer:
        """Look through all sessions on disk, on another thread. Raises sqlite3.Error."""
        without = question.without | self.deletions.hidden
        asked = replace(question, now_s=self.clock.now_s(), without=without)
        return await asyncio.to_thread(self._database.survey, asked)

    def page(self, owner_id: str, *, after: int, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions of an owner with higher numbers, in order; fewer only if
        there are no more. Raises sqlite3.Error."""
        now_s, found = self.clock.now_s(), list[SessionRow]()
        while len(found) < limit:
            rows = self._database.page(owner_id, after=after, now_s=now_s, limit=limit)
            found += [row for row in rows if row.number not in self.deletions.hidden]
            if len(rows) < limit:
                break
            after = rows[-1].number
        return found[:limit]

    def holdings(self) -> list[Holding]:
        """Return what each owner has on disk. O(sessions)."""
        return self._database.holdings()

    def expired(self, after: tuple[float, int], until_s: float, *, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions that expire before a time, in that order, behind one that
        is given by when it expires and its number. Raises sqlite3.Error."""
        return self._database.expired(after, until_s, limit=limit)

    def slices(self, row: SessionRow) -> Iterator[tuple[list[LogEntry], int]]:
        """Yield the entries of a session, in order, some at a time with their bytes. Raises
        Damaged, sqlite3.Error."""
        num_read = 0
        while num_read < row.num_entries:
            entries, num_bytes = self.slice_of(row, num_read)
            num_read += len(entries)
            yield entries, num_bytes

    def slice_of(self, row: SessionRow, start: int) -> tuple[list[LogEntry], int]:
        """Return some entries of a session from a position on, and their bytes; any thread may call
        it. Raises Damaged if they are not all that the row tells of, and as `slices`."""
        limit, most = ENTRIES_AT_ONCE, BYTES_AT_ONCE
        if self.is_shared:
            limit, most = SHARED_ENTRIES, SHARED_BYTES
        found = self._database.entries(row.number, start=start, limit=limit, max_bytes=most)
        num_read = start + len(found)
        if not found or num_read > row.num_entries:
            raise Damaged(f"{num_read} entries of {row.num_entries} are there")
        return [decode_entry(data) for data in found], sum(map(len, found))

    def is_long(self, row: SessionRow) -> bool:
        """Return whether the entries of a session are more than one slice."""
        return row.num_entries > ENTRIES_AT_ONCE or row.num_bytes > BYTES_AT_ONCE

    def records(self) -> list[RecordRow]:
        """Return all records, that first which was not written for longest. Raises
        sqlite3.Error."""
        return self._database.records()

    def part_slices(self, number: int) -> Iterator[Parts]:
        """Yield the parts of a record, in order, some at a time. Raises sqlite3.Error."""
        after = -1
        while parts := self._database.parts(
            number, after=after, limit=PARTS_AT_ONCE, max_bytes=BYTES_AT_ONCE
        ):
            yield parts
            after, _ = parts[-1]

    async def find_record(self, owner_id: str, record_id: str) -> RecordRow | None:
        """Return a record of a shared store. Raises `read_errors`."""
        assert self.lease is not None, "a store of this server alone"
        find = partial(self.lease.database.find_record, owner_id, record_id)
        return await self.lease.read(find)

    async def record_made_in(
        self, owner_id: str, session_id: str, kind: str, *, beside: str
    ) -> RecordRow | None:
        """Return a record of a shared store of a kind that was made in a session, other than one of
        an id. Raises `read_errors`."""
        assert self.lease is not None, "a store of this server alone"
        find = partial(self.lease.database.record_made_in, owner_id, session_id, kind)
        return await self.lease.read(partial(find, beside=beside))

    async def read_parts(self, number: int) -> list[Parts]:
        """Return the parts of a record of a shared store, in order. Raises `read_errors`."""
        assert self.lease is not None, "a store of this server alone"
        found, after = list[Parts](), -1
        limits = {"limit": SHARED_ENTRIES, "max_bytes": SHARED_BYTES}
        while parts := await self.lease.read(
            partial(self._database.parts, number, after=after, **limits)
        ):
            found.append(parts)
            after, _ = parts[-1]
        return found

    # -- writing

    def put(
        self,
        row: SessionRow,
        entries: _Entries,
        told: Told,
        beside: Beside | None = None,
        *,
        replica_id: int = 0,
    ) -> None:
        """Write a session in these entries, in place of what is there of it; `told` is called when
        it is on disk, or cannot be. `beside`: in the same commit. `replica_id`: who holds it."""

        def write(database: StoreVerbs) -> None:
            if replica_id != self.replica_id:
                # In epoch 1 it would be a new session, and it may have been deleted elsewhere.
                raise LeaseLost(f"replica {replica_id} has joined again as {self.replica_id}")
            database.put(row, *_pieces_of(entries))

        self.ask(write, told, _num_bytes_of(entries), beside)

    def append(
        self, row: SessionRow, entries: _Entries, told: Told, beside: Beside | None = None
    ) -> None:
        """Write entries behind the `row.num_entries` that are there; the others as in `put`."""

        def write(database: StoreVerbs) -> None:
            database.append(row, *_pieces_of(entries))

        self.ask(write, told, _num_bytes_of(entries), beside)

    def touch(self, row: SessionRow, told: Told) -> None:
        """Write what the row says, but no entry; `told` as in `put`."""
        self.ask(lambda database: database.touch(row), told)

    def is_gone(self, number: int | None) -> bool:
        """Return whether it is on disk that a session was deleted; None is that of none."""
        return self.is_synced and self.deletions.is_gone(number)

    def ask(
        self, write: Write, told: Told, num_bytes: int = 0, beside: Beside | None = None
    ) -> None:
        """Have something written, of so many bytes; `told` and `beside` as in `put`. A disk that
        does not answer, or has too much to write, fails it: nobody waits for ever. What it writes
        later is as if it had been told of."""
        if beside is not None:
            write, told, num_bytes = together((beside, Beside(write, told, num_bytes)))
        if self.clock.must_note():
            write = _noting(write, self.clock.noted_s)
        self._ask(write, told, num_bytes=num_bytes)

    def _ask(self, write: Write, told: Told, *, num_bytes: int) -> None:
        assert self._loop is not None, "a store that was not started"
        if self._num_waiting and self._num_waiting + num_bytes > MAX_WAITING_BYTES:
            # Not noted: whether the disk fails is seen by what waits for it.
            self._loop.call_soon(told, TimeoutError(_TOO_MUCH))
            return
        self._num_waiting += num_bytes

        def written(_error: Exception | None) -> None:
            self._num_waiting -= num_bytes

        self._watch(write, written, told)

    def _watch(self, write: Write, written: Told, told: Told) -> None:
        """Have something written; `told` is called no later than `Patience` allows."""
        assert self._loop is not None, "a store that was not started"
        answered = self._patience.wait(self._loop, partial(self._note, told))
        self._commits.ask(write, partial(tell_each, (written, answered)))

    def _ask_to_delete(self, write: Write, written: Told, told: Told, *, is_urgent: bool) -> None:
        if is_urgent:
            self._watch(write, written, told)
        else:
            told = partial(self._note, told)
            self._commits.ask_later(write, partial(tell_each, (written, told)))

    def _note(self, told: Told, error: Exception | None) -> None:
        if error is None or self._database.is_unavailable(error):
            self.health.note_write(error)
        elif isinstance(error, (Behind, NotOurs)):
            self.health.note_write(None)  # its session is written again, or goes on elsewhere
        else:
            log_bug("a write of the store", error)
        told(error)

    def _deliver(self, run: Callable[[], None]) -> None:
        assert self._loop is not None, "a store that was not started"
        with contextlib.suppress(RuntimeError):  # nobody is left to tell: a disk has hung
            self._loop.call_soon_threadsafe(run)


def _pieces_of(entries: _Entries) -> Sequence[bytes]:
    return entries.pieces() if isinstance(entries, LargeEntry) else entries


def _num_bytes_of(entries: _Entries) -> int:
    return entries.num_bytes if isinstance(entries, LargeEntry) else sum(map(len, entries))


def _noting(write: Write | None, now_s: float) -> Write:
    def noting(database: StoreVerbs) -> None:
        if write is not None:
            write(database)
        database.note_time(now_s)

    return noting


def _shown(time_s: float) -> str:
    return datetime.fromtimestamp(min(time_s, LAST_S), UTC).isoformat(" ", "seconds")
