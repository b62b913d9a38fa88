"""`StoredEnds`: delete sessions that are on disk alone, and with them the KV that only they had.

The engine does not know them, and finds their KV outside of the pools by their tokens. Reading
those takes time, so nobody waits for it: a session that is deleted is retired first, which is on
disk at once and hides it, and goes for good like those whose time is over, once the engine has
answered that nothing is left of its KV. That is kept up by the store, through the end of a process
and while there is no engine. One that the engine knows is retired too where KV is kept on disk.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from session_server.core.errors import EngineUnavailable
from session_server.core.owner import Owner
from session_server.sessions.backlog import SLICE
from session_server.sessions.cut_off import CutOff
from session_server.sessions.history_change import apply_tokens
from session_server.sessions.parts import SessionParts
from session_server.sessions.session import Session
from session_server.sessions.store.records import Damaged, Holding, SessionRow, decode_settings
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.store.writer import Told, tell_nobody
from session_server.sessions.turn_flow import TurnFlow

_logger: Final = logging.getLogger("session_server.store")

MAX_TOLD_TOKENS: Final = 1 << 17
"""Tokens of deleted sessions that the engine is told between two ticks; the last session may exceed
it. Its thread takes some 20 ms for them."""

AT_ONCE: Final = SLICE // 2
"""Of those that are retired, and of those whose time is over, that are read at a time. They are
gone before others are asked for: whoever waits for the disk waits for no more of them. About as
many are told to the engine before it answers."""

_LEAST_S: Final = 1.0
"""When those expire that are not retired, at the earliest: see `Database.put`."""

_Waiting = asyncio.Future[Any] | None
"""What somebody waits for who goes on once it is done; None: goes on when asked."""

_T = TypeVar("_T")


class StoredEnds:
    """Delete sessions of a store. `clock` returns monotonic seconds."""

    def __init__(
        self,
        store: SessionStore,
        parts: SessionParts,
        flow: TurnFlow,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._parts, self._copies = store, parts, flow.copies
        self._clock, self._backlog = clock, flow.backlog
        self._passes: list[Iterator[_Waiting] | None] = [None, None]
        self._waiting: list[_Waiting] = [None, None]
        self._now_s, self._num_told, self._num_asked = -math.inf, 0, 0
        self._is_deferred = False
        self.recounted_s = -math.inf
        """When others' part of what owners have was counted last."""

        store.deletions.on_freed = self._uncount_bytes

    def count(self) -> None:
        """Count what owners have on disk. Raises `read_errors`."""
        holdings = self._store.holdings()
        self._store.deletions.count(holdings)
        self._recount(holdings)

    def _recount(self, holdings: Iterable[Holding]) -> None:
        owned, stored = self._parts.quotas.owned_sessions, self._parts.quotas.stored_bytes
        owned.is_approximate = stored.is_approximate = self._store.is_shared
        for holding in holdings:
            owner = Owner(holding.owner_id)
            owned.recount(owner, holding.num_sessions)
            stored.recount(owner, holding.num_bytes)

    async def recount(self) -> None:
        """Count anew what owners have in a store that others share, those of whom this replica has
        something in memory, and have records go of which there are too many. Raises
        `read_errors`."""
        assert self._store.lease is not None, "a store of this server alone"
        quotas = self._parts.quotas
        owners = {owner.owner_id: owner for owner in quotas.history_bytes.owners}
        database = self._store.lease.database
        found = await self._store.lease.read(partial(database.holdings_of, list(owners)))
        nothing = dict.fromkeys(owners, Holding("", 0, 0, 0))
        held = nothing | {holding.owner_id: holding for holding in found}
        self._recount(each._replace(owner_id=owner_id) for owner_id, each in held.items())
        budget = quotas.budget_of("records")
        for owner_id, holding in held.items():
            most = budget.most(owners[owner_id])
            if most < min(budget.limit, holding.num_bytes):
                await self._evict_records(owner_id, most)
        await self._evict_records(None, budget.limit)

    async def _evict_records(self, owner_id: str | None, most_bytes: int) -> None:
        """Delete records of an owner, or of all together, beyond so many bytes of each kind: each
        replica makes room in memory for those that it knows, and others have written more."""
        assert self._store.lease is not None, "a store of this server alone"
        evict = partial(self._store.lease.database.evict_records, owner_id, most_bytes)
        while gone := await self._store.lease.read(evict):
            for each_id, num_bytes in gone:
                self._uncount_bytes(each_id, num_bytes)

    def delete(self, row: SessionRow, told: Told = tell_nobody) -> None:
        """Delete a session whose time is not over; `told` as in `Deletions.delete`."""
        self._parts.quotas.owned_sessions.add(Owner(row.owner_id), -1)
        deletions = self._store.deletions
        if self._may_leave_kv(row):
            deletions.retire(row.number, row.owner_id, row.num_bytes, told, epoch=row.epoch)
        else:
            deletions.delete(row.number, told, epoch=row.epoch)

    def expire(self, now_s: float) -> bool:
        """Delete a slice of the sessions whose time is over, or read a slice of one; return whether
        there is more to do at once. What waits for the disk goes on when that has answered, and the
        rest with the next tick, which has another `now_s`. A disk that fails is asked nothing."""
        if now_s != self._now_s:
            self._now_s, self._num_told = now_s, 0
            try:
                self._store.watch_clock()
            except self._store.read_errors as error:
                self._store.health.note_unread(error)
            times = -math.inf, _LEAST_S, self._store.clock.now_s()
            for kind, work in enumerate(self._passes):
                if work is None:
                    self._passes[kind] = self._pass(times[kind], times[kind + 1])
        is_busy = self._num_asked or len(self._copies.erasing) >= AT_ONCE
        if is_busy or self._store.failure is not None:
            return False
        # Each has its part: many that are retired do not keep others from expiring.
        has_more = [self._step(kind) for kind in range(len(self._passes))]
        return any(has_more)

    def _step(self, kind: int) -> bool:
        """Go on with those that are retired, or that expire; return whether there is more."""
        work = self._passes[kind]
        try:
            for waiting in work or ():
                if waiting is not None and waiting is not self._waiting[kind]:
                    self._waiting[kind] = waiting
                    waiting.add_done_callback(lambda _done: self._resume())
                return waiting is None
        except self._store.read_errors as error:
            if self._store.lease is None:
                self._store.health.note_unread(error)
        self._passes[kind] = None
        return False

    def _ask(self, call: Callable[[], _T]) -> Generator[_Waiting, None, _T]:
        """Read the store, and yield what is waited for where that takes the way to another machine.
        Raises what the call raises."""
        if self._store.lease is None:
            return call()
        answer = asyncio.ensure_future(self._store.lease.read(call))
        answer.add_done_callback(self._note)
        while not answer.done():
            yield answer
        return answer.result()

    def _note(self, answer: asyncio.Future[Any]) -> None:
        """Note a read that has failed when it fails: whoever asked may go on much later."""
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, self._store.read_errors):
            self._store.health.note_unread(error)

    def _pass(self, since_s: float, until_s: float) -> Iterator[_Waiting]:
        """Delete those that expire in this time, some with each step, each read once. One that is
        in memory expires there. Ends early where the engine can be told no more. Raises
        sqlite3.Error."""
        place, num_found = (since_s, -1), AT_ONCE
        while num_found == AT_ONCE:
            rows = yield from self._ask(partial(self._store.expired, place, until_s, limit=AT_ONCE))
            num_found = len(rows)
            for row in rows:
                place = row.expires_s, row.number
                is_ending = row.number in self._store.deletions.hidden
                if is_ending or row.number in self._copies.erasing or self._is_in_memory(row):
                    continue
                if not self._may_leave_kv(row):
                    self._end(row)
                elif not (yield from self._drop_kv(row)):
                    return
                else:
                    num_found = AT_ONCE  # while it was read, those behind it may have been closed
                    break
            yield None

    def _end(self, row: SessionRow) -> None:
        if not row.is_retired:
            self._parts.quotas.owned_sessions.add(Owner(row.owner_id), -1)
        self._num_asked += 1
        delete = partial(self._store.deletions.delete, row.number, epoch=row.epoch)
        delete(told=self._on_deleted, is_urgent=False)

    def _on_deleted(self, _error: Exception | None) -> None:
        self._num_asked -= 1
        if not self._num_asked:
            self._resume()

    def _resume(self) -> None:
        if not self._is_deferred:
            self._is_deferred = True
            self._backlog.defer(self._go_on)

    def _go_on(self) -> None:
        self._is_deferred = False
        if self.expire(self._now_s):
            self._is_deferred = True
            self._backlog.defer(self._go_on)

    def _is_in_memory(self, row: SessionRow) -> bool:
        session = self._parts.sessions.find(Owner(row.owner_id), row.session_id)
        if session is None:
            return False
        if session.life.log is not None and session.life.log.is_written:
            self._parts.logs.touch(session)
        return True

    def _may_leave_kv(self, row: SessionRow) -> bool:
        """Return whether KV of a session may be outside of the pools, where its tokens find it."""
        # One without a turn has computed nothing: what it has of another one is that one's.
        if row.model != self._store.model or not (row.is_whole and row.num_turns):
            return False
        if row.is_retired:
            return self._copies.may_leave_kv(self._clock())
        try:
            ttl_s = decode_settings(row.settings).ttl_s
        except Damaged:
            ttl_s = 0.0
        idle_s = self._store.clock.now_s() - (row.expires_s - ttl_s)
        return self._copies.may_leave_kv(self._clock() - idle_s)

    def _drop_kv(self, row: SessionRow) -> Generator[_Waiting, None, bool]:
        """Have the engine drop the KV of a session, whose tokens are read a slice with each step,
        and end it once that is gone; return False where it can be told no more. Raises
        sqlite3.Error."""
        if self._num_told >= MAX_TOLD_TOKENS:
            return False
        tokens, cut = array("i"), CutOff()

        def between(start: int, end: int) -> array[int]:
            return tokens[start:end]

        try:
            self._parts.link.check_up()
            num_read = 0
            while num_read < row.num_entries:
                entries, _ = yield from self._ask(partial(self._store.slice_of, row, num_read))
                num_read += len(entries)
                for entry in entries:
                    cut.follow(entry, len(tokens), between)
                    apply_tokens(tokens, entry.change)
                yield None
            if cut:
                owner, whole = Owner(row.owner_id), cut.whole(between)
                self._copies.forget(owner, row.name, whole, num_kept=cut.num_kept)
                self._num_told += len(whole)
            self._copies.erase(row, tokens, partial(self._end, row))
        except EngineUnavailable:
            return False  # the session is still there when there is an engine
        except (Damaged, ValueError) as error:
            _logger.error("session %s cannot be read, so its KV ages out: %s", row.name, error)
            self._end(row)
        self._num_told += len(tokens)
        return True

    def drop_cut(self, session: Session, cut: CutOff) -> None:
        """Have the engine drop the KV of what was cut off a session that was just read."""
        if cut and self._copies.may_leave_kv(session.life.last_active_s):
            self._copies.drop_end(session, cut.whole(session.transcript.tokens), cut.num_kept)

    def _uncount_bytes(self, owner_id: str, num_bytes: int) -> None:
        """Count bytes on disk no longer."""
        owner, stored = Owner(owner_id), self._parts.quotas.stored_bytes
        # A write that was given up, and came to be later, was not counted.
        stored.add(owner, -min(num_bytes, stored.held_by(owner)))
