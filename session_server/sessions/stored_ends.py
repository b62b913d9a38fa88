"""`StoredEnds`: delete sessions that are on disk alone, and with them the KV that only they had.

The engine does not know them, and finds their KV outside of the pools by their tokens. Reading
those takes time, so nobody waits for it: a session that is deleted is retired first, which is on
disk at once and hides it, and goes for good like those whose time is over, once the engine was
told. That is kept up by the store, through the end of a process and while there is no engine.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from array import array
from collections.abc import Callable, Iterator
from typing import Final

from session_server.core.errors import EngineUnavailable
from session_server.core.owner import Owner
from session_server.sessions.backlog import SLICE
from session_server.sessions.engine_copies import EngineCopies
from session_server.sessions.history_change import apply_tokens
from session_server.sessions.parts import SessionParts
from session_server.sessions.store.records import Damaged, SessionRow, decode_settings
from session_server.sessions.store.session_store import SessionStore

_logger: Final = logging.getLogger("session_server.store")

MAX_TOLD_TOKENS: Final = 1 << 17
"""Tokens of deleted sessions that the engine is told between two ticks; the last session may exceed
it. Its thread takes some 20 ms for them."""


class StoredEnds:
    """Delete sessions of a store. `clock` returns monotonic seconds."""

    def __init__(
        self,
        store: SessionStore,
        parts: SessionParts,
        copies: EngineCopies,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._parts, self._copies = store, parts, copies
        self._clock = clock
        self._work = self._delete_expired()
        self._now_s, self._num_told = -math.inf, 0

    def delete(self, row: SessionRow) -> None:
        """Delete a session whose time is not over. Raises sqlite3.Error."""
        self._uncount(row)
        if self._may_leave_kv(row):
            self._store.retire(row.number)
        else:
            self._store.delete(row.number)

    def expire(self, now_s: float) -> bool:
        """Delete a slice of the sessions whose time is over, or read a slice of one; return whether
        there may be more to do before the next tick, which has another `now_s`."""
        if now_s != self._now_s:
            self._now_s, self._num_told = now_s, 0
        if self._num_told >= MAX_TOLD_TOKENS:
            return False
        try:
            for _ in self._work:
                return True
        except sqlite3.Error as error:
            self._store.health.note_unread(error)
        except EngineUnavailable:
            pass  # the session is still there when there is an engine
        self._work = self._delete_expired()
        return False

    def _delete_expired(self) -> Iterator[None]:
        """Delete what has expired, a slice with each step. One that is in memory expires there.
        Raises EngineUnavailable, sqlite3.Error."""
        while True:
            num_deleted = 0
            for row in self._store.expired(limit=SLICE):
                if self._is_in_memory(row):
                    continue
                if self._may_leave_kv(row):
                    yield from self._drop_kv(row)
                if not row.is_retired:
                    self._uncount(row)
                self._store.delete(row.number)
                num_deleted += 1
            if num_deleted < SLICE:
                return
            yield

    def _is_in_memory(self, row: SessionRow) -> bool:
        session = self._parts.sessions.find(Owner(row.owner_id), row.session_id)
        if session is None:
            return False
        if session.life.log is not None and session.life.log.is_written:
            self._parts.logs.touch(session)
        return True

    def _may_leave_kv(self, row: SessionRow) -> bool:
        """Return whether KV of a session may be outside of the pools, where its tokens find it."""
        if row.model != self._store.model:
            return False
        if row.is_retired:
            return self._copies.may_leave_kv(self._clock())
        try:
            ttl_s = decode_settings(row.settings).ttl_s
        except Damaged:
            ttl_s = 0.0
        idle_s = self._store.wall_clock() - (row.expires_s - ttl_s)
        return self._copies.may_leave_kv(self._clock() - idle_s)

    def _drop_kv(self, row: SessionRow) -> Iterator[None]:
        """Have the engine drop the KV of a session, whose tokens are read a slice with each step.
        Raises EngineUnavailable, sqlite3.Error."""
        self._parts.link.check_up()
        tokens = array("i")
        try:
            for entries, _ in self._store.slices(row):
                for entry in entries:
                    apply_tokens(tokens, entry.change)
                yield
        except (Damaged, ValueError) as error:
            _logger.error("session %s cannot be read, so its KV ages out: %s", row.name, error)
            return
        self._copies.forget(Owner(row.owner_id), row.name, tokens)
        self._num_told += len(tokens)

    def _uncount(self, row: SessionRow) -> None:
        """Count a session on disk no longer. Raises sqlite3.Error."""
        owner, stored = Owner(row.owner_id), self._parts.quotas.stored_bytes
        # Of one that is damaged there may be more now than was counted.
        stored.add(owner, -min(self._store.num_bytes(row), stored.held_by(owner)))
        self._parts.quotas.owned_sessions.add(owner, -1)
