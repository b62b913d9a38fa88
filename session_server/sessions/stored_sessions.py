"""`StoredSessions`: bring sessions that are on disk into memory when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from session_server.core.owner import Owner
from session_server.sessions.backlog import SLICE
from session_server.sessions.opening import SessionMaker, history_modes
from session_server.sessions.quotas import Quotas
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.session import Session, SessionLife
from session_server.sessions.session_logs import SessionLogs, settings_of
from session_server.sessions.store.records import SessionRow
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.views import SessionView


@dataclass(frozen=True, slots=True)
class StoredSessions:
    """Restore the sessions of a store. Each is read once, when a client first names it."""

    store: SessionStore
    logs: SessionLogs
    sessions: SessionRegistry
    quotas: Quotas
    maker: SessionMaker

    def restore(self, owner: Owner, session_id: str) -> Session | None:
        """Return a session that is on disk, registered and counted, or None if there is none.

        Raises:
            UnknownModel: its tokens are those of another tokenizer.
            InternalInconsistency: what is stored of it is damaged.
            QuotaExceeded, ServerBusy: there is no room for it in memory.
        """
        row = self.store.find(owner.owner_id, session_id)
        if row is None:
            return None
        settings, left_s = settings_of(row), row.expires_s - self.store.wall_clock()
        life = SessionLife(
            self.maker.clock() + left_s - settings.ttl_s, order=row.number, num_uses=row.num_uses
        )
        session = self.maker.again(owner, settings, life, self.store.epoch_of(row.number))
        session.session_id = session_id
        self.logs.fill(session, row)
        self.quotas.take_session(session)
        self.sessions.restored(session)
        self.sessions.deadlines.watch(session)
        return session

    def order_of(self, owner: Owner, session_id: str) -> int | None:
        """Return the place of a session on disk in the order of its owner's, or None."""
        row = self.store.find(owner.owner_id, session_id)
        return None if row is None else row.number

    def page(self, owner: Owner, *, limit: int, after: int) -> list[tuple[int, SessionView]]:
        """Return up to `limit` sessions of an owner that are on disk alone, oldest first, with
        their places in the order."""
        rows = self.store.page(owner.owner_id, after=after, limit=limit)
        return [
            (row.number, self._view(row))
            for row in rows
            if self.sessions.find(owner, row.session_id) is None
        ]

    def expire(self) -> bool:
        """Delete a slice of the sessions on disk whose time has come; return whether there may be
        more. One that is in memory expires there."""
        rows = self.store.expired(limit=SLICE)
        for row in rows:
            session = self.sessions.find(Owner(row.owner_id), row.session_id)
            if session is None:
                self.store.delete(row.owner_id, row.session_id, row.number)
            else:
                self.logs.touch(session)
        return len(rows) == SLICE

    def _view(self, row: SessionRow) -> SessionView:
        settings = row.settings
        return SessionView(
            session_id=row.session_id,
            epoch=self.store.epoch_of(row.number),
            seq=0,
            state="cold",
            num_tokens=row.num_tokens,
            num_turns=row.num_turns,
            num_uses=row.num_uses,
            running_turn=None,
            queued_turns=0,
            ttl_s=settings.ttl_s,
            metadata=settings.metadata,
            is_pinned=settings.is_pinned,
            history=history_modes(settings.history, self.maker.text).plain,
            created_s=settings.created_s,
        )
