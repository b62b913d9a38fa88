"""`Restorer`: build a session again from what a store has of it."""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from session_server.core.errors import (
    InternalInconsistency,
    ServerBusy,
    ServerDraining,
    SessionMoved,
    UnknownModel,
)
from session_server.core.owner import Owner
from session_server.core.session_events import SessionState
from session_server.sessions.cut_off import CutOff
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.opening import SessionMaker, history_modes
from session_server.sessions.quotas import Quotas
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.session import (
    Hold,
    LogPlace,
    LogSize,
    Session,
    SessionConfig,
    SessionLife,
)
from session_server.sessions.session_logs import BUSY_S
from session_server.sessions.store.ownership import LeaseLost
from session_server.sessions.store.records import (
    Damaged,
    LogEntry,
    SessionRow,
    StoredSettings,
    decode_settings,
)
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.stored_ends import StoredEnds
from session_server.sessions.views import SessionView, StoredSummary

_logger: Final = logging.getLogger("session_server.store")


@dataclass(slots=True)
class Restored:
    """Hold a session that is being read, and what its log has cut off so far."""

    session: Session
    row: SessionRow
    cut: CutOff
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Restorer:
    """Build sessions that are in a store, and register them."""

    store: SessionStore
    ends: StoredEnds
    sessions: SessionRegistry
    quotas: Quotas
    maker: SessionMaker
    link: EngineLink

    def begin(self, owner: Owner, row: SessionRow) -> Restored:
        """Begin a session without its conversation. Raises UnsupportedOperation, UnknownModel,
        InternalInconsistency."""
        stored = settings_of(row)
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
        return Restored(session, row, CutOff())

    def read(self, restored: Restored, entries: Sequence[LogEntry], num_bytes: int) -> None:
        """Give a session what further entries have, of so many bytes. Raises
        InternalInconsistency."""
        session, transcript = restored.session, restored.session.transcript
        with refusing(restored.row):
            for entry in entries:
                restored.cut.follow(entry, len(transcript), transcript.tokens)
                transcript.apply(entry.change)
                for turn in entry.turns:
                    session.ended.restore(turn, is_durable=self.store.is_synced)
        restored.num_bytes += num_bytes

    def finish(self, restored: Restored) -> Session:
        """Return a session all of whose entries were read. Raises InternalInconsistency,
        UnknownModel."""
        session, row = restored.session, restored.row
        with refusing(row):
            session.transcript.check_places()
        ready = self.link.ready
        if ready is not None and not session.transcript.has_only(ready.vocab_size):
            raise UnknownModel("this session has token ids that the model does not have")
        held = LogSize(row.num_entries, restored.num_bytes, len(row.settings))
        hold = Hold(row.epoch, self.store.replica_id)
        session.life.log = LogPlace(held, expires_s=row.expires_s, hold=hold)
        session.life.log.num_uses = row.num_uses
        session.life.log.is_synced = self.store.is_synced
        self.ends.drop_cut(session, restored.cut)
        return session

    def register(self, session: Session) -> None:
        """Count and register a session. Raises QuotaExceeded, ServerBusy, ServerDraining."""
        if self.sessions.is_ending:
            # Its last write may be under way, and one log has one writer.
            raise ServerDraining("the server is shutting down")
        self.sessions.by_use.in_hand = None
        self.quotas.load_session(session)
        self.sessions.restored(session)
        self.sessions.deadlines.watch(session)

    def summary(self, row: SessionRow, place: float) -> StoredSummary:
        """Return what operators are told of a session that was not read, with its place among
        others."""
        view = self.view(row, "cold")
        idle_s = self.store.clock.now_s() - (row.expires_s - view.ttl_s)
        return StoredSummary(row.number, row.owner_id, view, max(0.0, idle_s), place)

    def view(self, row: SessionRow, state: SessionState) -> SessionView:
        """Return what is known of a session without its conversation; of one whose settings are
        damaged that is little."""
        try:
            settings = settings_of(row)
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
    """Raise ServerBusy where the disk cannot be read, SessionMoved where the lease is over."""
    try:
        yield
    except LeaseLost as error:  # the database knows before this replica does
        raise SessionMoved("this replica has lost its lease: ask again") from error
    except store.read_errors as error:
        store.health.note_unread(error)
        raise ServerBusy("the store of sessions cannot be read now") from error


@contextlib.contextmanager
def refusing(row: SessionRow) -> Iterator[None]:
    """Raise InternalInconsistency where content raises that no server has written there."""
    try:
        yield
    except (Damaged, ValueError, ArithmeticError, LookupError, OSError, struct.error) as error:
        raise _damaged(row, error) from error


def settings_of(row: SessionRow) -> StoredSettings:
    """Return what a client chose. Raises InternalInconsistency if it is damaged."""
    try:
        return decode_settings(row.settings)
    except Damaged as error:
        raise _damaged(row, error) from error


def is_spare(row: SessionRow) -> bool:
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
