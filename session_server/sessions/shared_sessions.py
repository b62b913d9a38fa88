"""`SharedSessions`: take sessions of a shared store when they are asked for, and give them up.

A replica reads a session only as its holder. One that another replica holds is asked for; where
that runs a turn of it, whoever asks waits a while, and is then told that the session has moved.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from session_server.core.errors import (
    InternalInconsistency,
    ServerBusy,
    SessionMoved,
    SessionServerError,
    UnknownModel,
    UnsupportedOperation,
)
from session_server.core.owner import Owner
from session_server.sessions.bugs import log_bug
from session_server.sessions.lookout import Lookout
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.restoring import Restorer, is_spare, reading, refusing
from session_server.sessions.session import Session
from session_server.sessions.session_logs import SessionLogs
from session_server.sessions.store.backend import SharedDatabase
from session_server.sessions.store.lease import ReplicaLease
from session_server.sessions.store.ownership import HeldBy, NotOurs
from session_server.sessions.store.records import SessionRow
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.store.survey import SurveyQuestion
from session_server.sessions.views import SessionView, StoredSummary

HANDOVER_WAIT_S: Final = 8.0
"""How long a request waits for the replica that holds its session."""

ADOPTED_AT_ONCE: Final = 4
"""Sessions that are read: they count once they are in memory."""

ENTRIES_APPLIED: Final = 16
"""Entries of a log that are applied before others are served."""

RECOUNT_S: Final = 30.0
"""How long what other replicas keep for an owner is not counted against what it may have."""

MAX_ASKED: Final = 1024
"""Sessions that are not in memory and that others ask for, until they are released; of further ones
others ask again."""

MAX_LOOKED_UP: Final = 4096
"""Ids that were looked up last; what is asked of them next is answered without the database."""

_UNREADABLE: Final = (InternalInconsistency, UnknownModel, UnsupportedOperation)
"""What a session raises that can be deleted, but not read."""

_Key = tuple[str, str]

Written = Callable[[Session], Awaitable[None]]
"""Waits until the KV of a session that has left is where others look for it, for a while."""


@dataclass(slots=True, eq=False)
class _Loading:
    """Hold a session that is being brought here. `number`: as it was found; None before, or where
    there is none; `is_known` is set then. `is_asked`: others ask for it."""

    task: asyncio.Task[None] | None = None
    number: int | None = None
    is_known: asyncio.Event = field(default_factory=asyncio.Event)
    is_asked: bool = False

    def found(self, number: int) -> None:
        """Note which session it is."""
        self.number = number
        self.is_known.set()


@dataclass(frozen=True, slots=True)
class _Ours:
    """Hold which sessions this replica does not take, by number: in another epoch what it still
    writes of them, or deletes, would be refused."""

    deleting: Container[int]
    sessions: SessionRegistry

    def __contains__(self, number: object) -> bool:
        is_here = isinstance(number, int) and self.sessions.numbered(number) is not None
        return is_here or number in self.deleting


@dataclass(slots=True)
class _Unread:
    """Delete sessions that cannot be read, one at a `turn`: who takes one a second time has its
    first deletion refused. `deleted`: those that nobody was told of yet."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    deleted: dict[_Key, SessionView] = field(default_factory=dict)


class SharedSessions:
    """Take, find and give up the sessions of a shared store."""

    def __init__(self, restorer: Restorer, lease: ReplicaLease) -> None:
        self._restorer, self._lease = restorer, lease
        self._lookout = Lookout(lease, restorer.sessions)
        self._loading: dict[_Key, _Loading] = {}
        self._at_once = asyncio.Semaphore(ADOPTED_AT_ONCE)
        self._looked_up: dict[_Key, int | None] = {}
        self._asked: set[int] = set()
        """Sessions that were not in memory when others asked for them; while there are any
        `_release_asked` goes on."""

        self._unread = _Unread()
        self._releasing: Counter[int] = Counter()
        """How many releases of a session the database may still do, also when nobody waits."""

        self._leaving: dict[_Key | int, asyncio.Task[None]] = {}
        """Sessions that are no longer in memory, and still to be released, by name and by
        number."""

        self._tasks: set[asyncio.Task[None]] = set()
        self.give_up: Callable[[Session], None] = lambda _session: None
        lease.told.on_asked = self._on_asked

    @property
    def _store(self) -> SessionStore:
        return self._restorer.store

    @property
    def _sessions(self) -> SessionRegistry:
        return self._restorer.sessions

    @property
    def _database(self) -> SharedDatabase:
        return self._lease.database

    def check(self) -> None:
        """Raise SessionMoved if this replica may not answer for what it has in memory."""
        self._lease.check()

    def forget(self, session: Session) -> None:
        """Forget what was looked up of a session that has left the memory."""
        self._looked_up.pop((session.owner.owner_id, session.session_id), None)

    # -- bringing sessions here

    async def load(self, owner: Owner, session_id: str) -> None:
        """Hold a session, and have it in memory. Does nothing for one that does not exist.

        Raises:
            SessionMoved: another replica holds it, and does not give it up now.
            ServerBusy: the database cannot be read, or there is no room in memory.
            ServerDraining: the server shuts down.
            And whatever `Restorer` raises.
        """
        session = self._sessions.find(owner, session_id)
        if session is not None and session.life.log is None:
            return  # it is in no store
        self.check()
        key = owner.owner_id, session_id
        while (session := self._sessions.find(owner, session_id)) is not None:
            if session.closing != "moved":
                return
            await self._moving(session)
        joined = self._loading.get(key)
        if joined is not None and joined.task is not None:
            await asyncio.shield(joined.task)
            if self._sessions.find(owner, session_id) is not None:
                return
            # That began before this was asked: the session may be there since.
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = _Loading()
            loading.task = self._spawn(self._adopt(owner, session_id, loading))
            loading.task.add_done_callback(partial(self._on_loaded, key))
        assert loading.task is not None, "a session that nothing brings here"
        # Others may wait for it too, and it is registered whole or not at all.
        await asyncio.shield(loading.task)

    def _on_loaded(self, key: _Key, _task: asyncio.Task[None]) -> None:
        loading = self._loading.pop(key)
        loading.is_known.set()
        if loading.is_asked and loading.number is not None:
            self._on_asked(loading.number)

    async def _moving(self, session: Session) -> None:
        """Wait until a session that is asked for has left. Raises SessionMoved."""
        try:
            async with asyncio.timeout(HANDOVER_WAIT_S):
                await self._sessions.until_gone(session)
        except TimeoutError:
            session.check_not_closing()

    async def _adopt(self, owner: Owner, session_id: str, loading: _Loading) -> None:
        leaving = self._leaving.get((owner.owner_id, session_id))
        if leaving is not None:  # to take it first, and release it then, would leave it nobody's
            await asyncio.wait([leaving], timeout=HANDOVER_WAIT_S)
            if not leaving.done():
                raise SessionMoved("the session is being written: ask again")
        held_as = self._lease.replica_id
        row = await self._take(owner, session_id, loading)
        if self._sessions.find(owner, session_id) is not None:  # it was opened here meanwhile
            if row is None:
                return
            self._spawn(self._release(row.number))
            raise SessionMoved("a session of this id is being opened here: ask again")
        self._note_looked_up(owner, session_id, row)
        if row is None:
            return
        loading.found(row.number)
        try:
            async with self._at_once:
                await self._restore(owner, row, held_as)
        except SessionServerError as error:
            if isinstance(error, InternalInconsistency) and not await self._is_still_ours(row):
                raise SessionMoved("the session has moved while it was read: ask again") from None
            releasing = self._spawn(self._release(row.number))
            if isinstance(error, _UNREADABLE):  # taken before, to be deleted, it would be free then
                await asyncio.wait([releasing])
            raise

    async def _take(
        self, owner: Owner, session_id: str, loading: _Loading | None = None
    ) -> SessionRow | None:
        until_s = asyncio.get_running_loop().time() + HANDOVER_WAIT_S
        deleting = self._store.deletions.hidden
        ours = _Ours(deleting, self._sessions)
        take = partial(self._database.take, owner.owner_id, session_id, ours)
        with reading(self._store):
            while isinstance(found := await self._lease.read(take), HeldBy):
                if loading is not None:
                    loading.found(found.number)
                held = await self._lookout.until_free(found, until_s)
                if held is not None:
                    where = f" at {held.address}" if held.address else ""
                    raise SessionMoved(f"the session is in another replica{where}: ask again")
        if found is not None and found.number in deleting:  # since it was looked at
            raise SessionMoved("the session was to be deleted meanwhile: ask again")
        if found is not None and (found.number in self._leaving or self._releasing[found.number]):
            # What nobody waits for any more may still be done, and be of this epoch then.
            raise SessionMoved("the session is being released: ask again")
        return found

    async def _is_still_ours(self, row: SessionRow) -> bool:
        """Return whether nobody has taken a session since this replica did: what was read of it is
        of one log then."""
        with reading(self._store):
            found = await self._lease.read(partial(self._database.numbered, row.number))
        return found is not None and found.epoch == row.epoch

    async def _restore(self, owner: Owner, row: SessionRow, held_as: int) -> None:
        """Read a session that is held as that replica. Raises SessionMoved if it is no longer."""
        restored, num_read = self._restorer.begin(owner, row), 0
        while num_read < row.num_entries:
            # In this order: a database that does not answer has damaged nothing.
            with refusing(row), reading(self._store):
                entries, num_bytes = await self._lease.read(
                    partial(self._store.slice_of, row, num_read)
                )
            num_read += len(entries)
            for start in range(0, len(entries), ENTRIES_APPLIED):
                some = entries[start : start + ENTRIES_APPLIED]
                self._restorer.read(restored, some, num_bytes if start == 0 else 0)
                await asyncio.sleep(0)
        # What was in memory when the lease was lost was given up, and this was not there yet.
        self._lease.check()
        if self._lease.replica_id != held_as:
            raise SessionMoved("this replica has lost its lease meanwhile: ask again")
        self._restorer.register(self._restorer.finish(restored))

    def restore(self, owner: Owner, session_id: str) -> Session | None:
        """Return None for a session that is known not to exist. Raises ServerBusy for any other:
        `load` reads it."""
        self.check()
        if self.order_of(owner, session_id) is not None:
            raise ServerBusy("the session has just left the memory: ask again")
        return None

    # -- giving them up

    def _on_asked(self, number: int) -> None:
        if not self._gives_up(number) and len(self._asked) < MAX_ASKED:
            if not self._asked:
                self._spawn(self._release_asked())
            self._asked.add(number)

    def _gives_up(self, number: int) -> bool:
        """Give up a session that is in memory; return whether it was, or is on its way to others:
        it is released once all of it is written."""
        session = self._sessions.numbered(number)
        if session is not None:
            self.give_up(session)
        return session is not None or number in self._leaving

    async def _release_asked(self) -> None:
        """Release what others ask for and nobody reads here, all of it at once; what is asked for
        meanwhile comes next."""
        loading = self._loading.values()
        try:
            while asked := self._asked.copy():
                for each in list(loading):
                    await each.is_known.wait()  # it may be one of them
                being_read = {each.number: each for each in loading}
                unread = list[int]()
                for number in asked:
                    if number in being_read:
                        being_read[number].is_asked = True
                    elif not self._gives_up(number):
                        unread.append(number)
                if unread:
                    await self._release(*unread)
                self._asked -= asked
        finally:
            self._asked.clear()  # behind a bug too others are heard again

    def on_left(self, session: Session, *, logs: SessionLogs, written: Written) -> None:
        """Release a session that has left the memory, once all of it is written."""
        task = self._spawn(self._part_from(session, logs, written))
        names = (session.owner.owner_id, session.session_id), session.life.order
        self._leaving.update(dict.fromkeys(names, task))

        def is_gone(_task: asyncio.Task[None]) -> None:
            for name in names:
                if self._leaving.get(name) is task:
                    del self._leaving[name]

        task.add_done_callback(is_gone)

    async def _recount(self) -> None:
        with reading(self._store):
            await self._restorer.ends.recount()

    async def _part_from(self, session: Session, logs: SessionLogs, written: Written) -> None:
        is_ours = await logs.part_from(session)
        await written(session)
        if is_ours:
            await self._release(session.life.order)

    async def _release(self, *numbers: int) -> None:
        self._releasing.update(numbers)
        release = partial(self._database.release, numbers)
        # Where that fails it is this replica's until somebody asks again, or its lease is over.
        with contextlib.suppress(*self._store.read_errors):
            await self._lease.read(release, on_over=partial(self._note_released, numbers))

    def _note_released(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._releasing[number] -= 1
            if not self._releasing[number]:
                del self._releasing[number]

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Do something that nobody waits for, or that goes on when nobody does any more."""
        task = asyncio.create_task(work, name="shared session")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, SessionServerError):
            log_bug("a session of the shared store", error)

    # -- looking at them

    async def look_up(self, owner: Owner, session_id: str) -> None:
        """Find out whether a session exists, without holding it. Raises ServerBusy."""
        if self._sessions.find(owner, session_id) is None:
            with reading(self._store):
                find = partial(self._database.find, owner.owner_id, session_id)
                row = self._store.if_open(await self._lease.read(find))
            self._note_looked_up(owner, session_id, row)

    def _note_looked_up(self, owner: Owner, session_id: str, row: SessionRow | None) -> None:
        key = owner.owner_id, session_id
        self._looked_up.pop(key, None)
        self._looked_up[key] = None if row is None else row.number
        if len(self._looked_up) > MAX_LOOKED_UP:
            del self._looked_up[next(iter(self._looked_up))]

    def order_of(self, owner: Owner, session_id: str) -> int | None:
        """Return the place in the order of a session that was looked up or loaded; None if there is
        none. Raises ServerBusy for any other."""
        try:
            return self._looked_up[owner.owner_id, session_id]
        except KeyError:
            raise ServerBusy("the session was not looked up: ask again") from None

    async def page(self, owner: Owner, *, limit: int, after: int) -> list[tuple[int, SessionView]]:
        """Return up to `limit` sessions of an owner that this replica does not have in memory.
        Raises ServerBusy, and SessionMoved: what it has there is listed with them."""
        page = partial(
            self._database.page,
            owner.owner_id,
            after=after,
            now_s=self._store.clock.now_s(),
            limit=limit,
        )
        with reading(self._store):
            rows = await self._lease.read(page)
        self.check()
        hidden = self._store.deletions.hidden
        return [
            (row.number, self._restorer.view(row, "cold"))
            for row in rows
            if row.number not in hidden and not self._is_here(owner, row)
        ]

    def _is_here(self, owner: Owner, row: SessionRow) -> bool:
        session = self._sessions.find(owner, row.session_id)
        return session is not None and not session.is_lost

    async def survey(self, question: SurveyQuestion) -> tuple[list[StoredSummary], int]:
        """Look through all sessions that are not in memory here. Raises ServerBusy."""
        with reading(self._store):
            answer = await self._store.survey(question)
        found = [self._restorer.summary(row, place) for place, row in answer.found]
        return found, answer.num_matching

    async def numbered(self, number: int) -> StoredSummary | None:
        """Return the session of a number. Raises ServerBusy."""
        with reading(self._store):
            found = await self._lease.read(partial(self._database.numbered, number))
            row = self._store.if_open(found)
        return None if row is None else self._restorer.summary(row, 0.0)

    # -- deleting them

    async def prepare_close(self, owner: Owner, session_id: str) -> None:
        """Hold a session that is to be deleted; one that cannot be read is deleted unread. Raises
        as `load` does."""
        try:
            await self.load(owner, session_id)
        except _UNREADABLE:
            async with self._unread.turn:
                row = await self._take(owner, session_id)
                if row is not None:
                    view = self._restorer.view(row, "closing")
                    view = replace(view, is_durable=await self._delete(row))
                    self._unread.deleted[owner.owner_id, session_id] = view

    async def _delete(self, row: SessionRow) -> bool:
        """Delete a session that is not in memory, and wait until that is on disk, or cannot be;
        return whether it is. Raises SessionMoved if it goes on in another replica."""
        answered = asyncio.get_running_loop().create_future()

        def told(error: Exception | None) -> None:
            if not answered.done():
                answered.set_result(error)

        self._restorer.ends.delete(row, told)
        error = await answered
        if isinstance(error, NotOurs):
            raise SessionMoved("the session goes on in another replica: ask again")
        return error is None

    def close(self, owner: Owner, session_id: str) -> SessionView | None:
        """Return a session that `prepare_close` has deleted unread."""
        return self._unread.deleted.pop((owner.owner_id, session_id), None)

    def spare(self, owner: Owner, session_id: str) -> None:
        """Delete some time a session that only the surface that opened it has used."""
        self._spawn(self._spare(owner, session_id))

    async def _spare(self, owner: Owner, session_id: str) -> None:
        row = await self._take(owner, session_id)
        if row is not None and is_spare(row):
            self._restorer.ends.delete(row)

    def expire(self, now_s: float) -> bool:
        """Delete some whose time is over; see `StoredEnds.expire`. Count now and then what owners
        have, because other replicas add to it."""
        ends = self._restorer.ends
        if now_s >= ends.recounted_s + RECOUNT_S:
            ends.recounted_s = now_s
            self._spawn(self._recount())
        return ends.expire(now_s)
