"""`StoredSessions`: bring sessions that are on disk into memory when they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from session_server.core.errors import (
    InternalInconsistency,
    ServerBusy,
    ServerDraining,
    UnknownModel,
)
from session_server.core.owner import Owner
from session_server.core.session_events import SessionState
from session_server.sessions.backlog import SLICE
from session_server.sessions.cut_off import CutOff
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.opening import SessionMaker, history_modes
from session_server.sessions.quotas import Quotas
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.session import LogPlace, LogSize, Session, SessionConfig, SessionLife
from session_server.sessions.session_logs import BUSY_S
from session_server.sessions.store.records import (
    Damaged,
    SessionRow,
    StoredSettings,
    decode_settings,
)
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.store.survey import SurveyQuestion
from session_server.sessions.stored_ends import StoredEnds
from session_server.sessions.views import SessionView, StoredSummary

_logger: Final = logging.getLogger("session_server.store")


@dataclass(frozen=True, slots=True)
class StoredSessions:
    """Restore the sessions of a store. Each is read once, when a client first names it."""

    store: SessionStore
    ends: StoredEnds
    sessions: SessionRegistry
    quotas: Quotas
    maker: SessionMaker
    link: EngineLink
    _turnstile: asyncio.Lock = field(default_factory=asyncio.Lock)

    def restore(self, owner: Owner, session_id: str) -> Session | None:
        """Return a session that is on disk, registered and counted, or None if there is none. A
        long one is refused: nobody is served while it is read, unless `load` reads it.

        Raises:
            UnknownModel: its tokens are those of another tokenizer or chat template, or it has some
                that the model does not have.
            UnsupportedOperation: it asked for a `history` that this model's template cannot write.
            InternalInconsistency: what is stored of it is damaged.
            QuotaExceeded, ServerBusy: there is no room for it in memory, or no disk to read.
            ServerDraining: this process is about to end.
        """
        with reading(self.store):
            row = self.store.find(owner.owner_id, session_id)
            if row is None:
                return None
            session = self._begin(owner, row)
            if self.store.is_long(row):
                raise ServerBusy("the session has just left the memory: ask again")
            for _ in self._fill(session, row):
                pass
        self._register(session)
        return session

    async def load(self, owner: Owner, session_id: str) -> None:
        """Restore a long session in slices, others being served in between; one such session at a
        time, because it is counted when it is there. Does nothing for any other. Raises what
        `restore` raises."""
        if self._find_long(owner, session_id) is None:
            return
        async with self._turnstile:
            row = self._find_long(owner, session_id)
            if row is None:
                return
            session = self._begin(owner, row)
            with reading(self.store):
                for _ in self._fill(session, row):
                    await asyncio.sleep(0)
                    is_same = self.store.find(owner.owner_id, session_id) == row
                    if not is_same or self.sessions.find(owner, session_id) is not None:
                        return  # it was deleted, and may have been opened anew
            self._register(session)

    def _find_long(self, owner: Owner, session_id: str) -> SessionRow | None:
        """Return a long session that is on disk alone."""
        if self.sessions.find(owner, session_id) is not None:
            return None
        with reading(self.store):
            row = self.store.find(owner.owner_id, session_id)
            return row if row is not None and self.store.is_long(row) else None

    def order_of(self, owner: Owner, session_id: str) -> int | None:
        """Return the place of a session on disk in the order of its owner's, or None. Raises
        ServerBusy if the disk cannot be read."""
        with reading(self.store):
            row = self.store.find(owner.owner_id, session_id)
        return None if row is None else row.number

    def page(self, owner: Owner, *, limit: int, after: int) -> list[tuple[int, SessionView]]:
        """Return up to `limit` sessions of an owner that are on disk, oldest first, with their
        places in the order, without those that are in memory. Raises ServerBusy if the disk cannot
        be read."""
        with reading(self.store):
            rows = self.store.page(owner.owner_id, after=after, limit=limit)
        return [
            (row.number, self._view(row, "cold"))
            for row in rows
            if self.sessions.find(owner, row.session_id) is None
        ]

    async def survey(self, question: SurveyQuestion) -> tuple[list[StoredSummary], int]:
        """Look through all sessions on disk alone; return those that were asked for, and how many
        match. Raises ServerBusy if the disk cannot be read."""
        with reading(self.store):
            answer = await self.store.survey(question)
        found = [self._summary(row, place) for place, row in answer.found]
        return found, answer.num_matching

    def numbered(self, number: int) -> StoredSummary | None:
        """Return the session of a number that is on disk; None if there is none. Raises ServerBusy
        if the disk cannot be read."""
        with reading(self.store):
            row = self.store.numbered(number)
        return None if row is None else self._summary(row, 0.0)

    def _summary(self, row: SessionRow, place: float) -> StoredSummary:
        view = self._view(row, "cold")
        idle_s = self.store.clock.now_s() - (row.expires_s - view.ttl_s)
        return StoredSummary(row.number, row.owner_id, view, max(0.0, idle_s), place)

    def close(self, owner: Owner, session_id: str) -> SessionView | None:
        """Delete a session that is on disk alone, whether or not it could be served; None if there
        is none. Raises ServerBusy if the disk cannot be read."""
        with reading(self.store):
            row = self.store.find(owner.owner_id, session_id)
            if row is None:
                return None
            self.ends.delete(row)
        return self._view(row, "closing")

    def spare(self, owner: Owner, session_id: str) -> None:
        """Delete a session that is on disk alone, if only the surface that opened it for a client
        has used it. Raises ServerBusy if the disk cannot be read."""
        with reading(self.store):
            row = self.store.find(owner.owner_id, session_id)
            if row is not None and _is_spare(row):
                self.ends.delete(row)

    def make_room(self, owner: Owner, *, of_others: bool) -> bool:
        """Delete the oldest session of an owner that is on disk alone and that nobody but its
        surface has used, if one of the first ones is such; return whether it is. Raises ServerBusy
        if the disk cannot be read."""
        with reading(self.store):
            for row in self.store.page(owner.owner_id, after=0, limit=SLICE):
                if self.sessions.find(owner, row.session_id) is None and _is_spare(row):
                    self.ends.delete(row)
                    return True
        return False

    def expire(self, now_s: float) -> bool:
        """Delete some whose time is over; see `StoredEnds.expire`."""
        return self.ends.expire(now_s)

    def _begin(self, owner: Owner, row: SessionRow) -> Session:
        """Return a session without its conversation. Raises UnsupportedOperation, UnknownModel,
        InternalInconsistency."""
        stored = _settings(row)
        # A clock that was set meanwhile gives no session more than its own time.
        left_s = min(self.store.clock.left_s(row.expires_s), stored.ttl_s + BUSY_S)
        settings = _config(stored)
        settings.is_pinned &= self.maker.limits.allows_pinned
        life = SessionLife(
            self.maker.clock() + left_s - settings.ttl_s,
            order=row.number,
            num_uses=row.num_uses,
            num_own_uses=stored.num_own_uses,
        )
        session = self.maker.again(owner, settings, life)
        session.session_id = row.session_id
        session.transcript.now = datetime.fromtimestamp(stored.now_s).astimezone()
        if row.model != self.store.model:
            raise UnknownModel(
                "this session was held with a model that has another tokenizer or chat template"
            )
        return session

    def _fill(self, session: Session, row: SessionRow) -> Iterator[None]:
        """Give a new session the conversation that is in the store, some of it with each step.
        Raises InternalInconsistency, UnknownModel, sqlite3.Error."""
        num_bytes, cut, transcript = 0, CutOff(), session.transcript
        with _refusing(row):
            for entries, size in self.store.slices(row):
                for entry in entries:
                    cut.follow(entry, len(transcript), transcript.tokens)
                    transcript.apply(entry.change)
                    for turn in entry.turns:
                        session.ended.restore(turn, is_durable=self.store.is_synced)
                num_bytes += size
                yield
            transcript.check_places()
        ready = self.link.ready
        if ready is not None and not transcript.has_only(ready.vocab_size):
            raise UnknownModel("this session has token ids that the model does not have")
        held = LogSize(row.num_entries, num_bytes, len(row.settings))
        session.life.log = LogPlace(held, expires_s=row.expires_s)
        session.life.log.num_uses = row.num_uses
        session.life.log.is_synced = self.store.is_synced
        self.ends.drop_cut(session, cut)

    def _register(self, session: Session) -> None:
        """Count and register a session. Raises QuotaExceeded, ServerBusy, ServerDraining."""
        if self.sessions.is_ending:
            # Its last write may be under way, and one log has one writer.
            raise ServerDraining("the server is shutting down")
        self.sessions.by_use.in_hand = None
        self.quotas.load_session(session)
        self.sessions.restored(session)
        self.sessions.deadlines.watch(session)

    def _view(self, row: SessionRow, state: SessionState) -> SessionView:
        """Return what is known of a session without its conversation; of one whose settings are
        damaged that is little."""
        try:
            settings = _settings(row)
        except InternalInconsistency:
            settings = StoredSettings(0.0, {}, False, 0.0, b"", None, 0.0)
        history = settings.history
        if history is None:
            history = history_modes(None, self.maker.text).plain
        return SessionView(
            session_id=row.session_id,
            epoch="",
            seq=0,
            state=state,
            num_tokens=row.num_tokens,
            num_turns=row.num_turns,
            num_uses=row.num_uses,
            running_turn=None,
            queued_turns=0,
            ttl_s=settings.ttl_s,
            metadata=settings.metadata,
            is_pinned=settings.is_pinned,
            history=history,
            created_s=settings.created_s,
            is_durable=self.store.is_synced,
        )


@contextlib.contextmanager
def reading(store: SessionStore) -> Iterator[None]:
    """Raise ServerBusy where the disk cannot be read."""
    try:
        yield
    except sqlite3.Error as error:
        store.health.note_unread(error)
        raise ServerBusy("the store of sessions cannot be read now") from error


@contextlib.contextmanager
def _refusing(row: SessionRow) -> Iterator[None]:
    """Raise InternalInconsistency where content raises that no server has written there."""
    try:
        yield
    except (Damaged, ValueError, ArithmeticError, LookupError, OSError, struct.error) as error:
        raise _damaged(row, error) from error


def _settings(row: SessionRow) -> StoredSettings:
    """Return what a client chose. Raises InternalInconsistency if it is damaged."""
    try:
        return decode_settings(row.settings)
    except Damaged as error:
        raise _damaged(row, error) from error


def _is_spare(row: SessionRow) -> bool:
    """Return whether only the surface that opened a session has used it."""
    try:
        num_own_uses = decode_settings(row.settings).num_own_uses
    except Damaged:
        return False
    return num_own_uses is not None and row.num_uses <= num_own_uses


def _damaged(row: SessionRow, error: Exception) -> InternalInconsistency:
    """Log why a session cannot be read, and return what its client is told."""
    _logger.error("session %s cannot be read: %s", row.session_id, error)
    return InternalInconsistency("what is stored of this session is damaged")


def _config(stored: StoredSettings) -> SessionConfig:
    """Return the settings of a session in the store."""
    return SessionConfig(
        ttl_s=stored.ttl_s,
        metadata=stored.metadata,
        is_pinned=stored.is_pinned,
        is_single_turn=False,
        created_s=stored.created_s,
        request_digest=stored.request_digest,
        asked_history=stored.history,
    )
