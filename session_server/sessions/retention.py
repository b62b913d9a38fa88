"""Say what becomes of the KV of a session at rest: it goes to the radix tree or comes back to it,
or it is pinned."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from session_server.core.commands import CoolSession, WarmSession
from session_server.core.errors import EngineUnavailable
from session_server.core.owner import Owner
from session_server.sessions.drafts import SessionDrafts
from session_server.sessions.opening import check_can_pin
from session_server.sessions.parts import SessionParts
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.session import Session
from session_server.sessions.views import SessionView


@dataclass(frozen=True, slots=True)
class SessionRetention:
    """Cool, warm and pin the sessions of a manager."""

    parts: SessionParts
    limits: SessionLimits
    drafts: SessionDrafts

    def cool(self, owner: Owner, session_id: str) -> SessionView:
        """Leave the KV of a session to the radix tree, where others may use it and pressure takes
        it first. Its next turn finds what is left.

        Raises:
            SessionNotFound, SessionClosing
            SessionBusy: a turn has not ended.
        """
        session = self.parts.resting(owner, session_id)
        self.drafts.stop(session)
        link, copy = self.parts.link, session.copy
        if copy.state == "resident" and copy.known_len(link.generation) is not None:
            link.send_or_queue(CoolSession(session_id=copy.session_id))
        self.parts.mark_cold(session)
        return session.view()

    def warm(self, owner: Owner, session_id: str) -> SessionView:
        """Have what is kept of a session at rest outside of the pools brought back into them, ahead
        of its next turn; nothing is computed.

        Nothing is promised: where nothing can be kept, there is no room or no engine, or a turn has
        not ended, nothing happens. The session's state stays what it is.

        Raises:
            SessionNotFound, SessionClosing
        """
        session = self.parts.sessions.use(owner, session_id)
        session.check_not_closing()
        self._warm(session)
        return session.view()

    def attach(self, owner: Owner, session_id: str) -> None:
        """Warm a session because a client begins to follow it, which may say something next. This
        is no use of the session. Raises SessionNotFound."""
        self._warm(self.parts.sessions.get(owner, session_id))

    def pin(self, owner: Owner, session_id: str, *, pinned: bool) -> SessionView:
        """Pin a session, or no longer, from its next turn on: until then its KV is the tree's.

        That turn is refused if the pinned quota has no room. Raises what `cool` raises, and
        UnsupportedOperation where no memory is kept for pinned sessions.
        """
        if pinned:
            check_can_pin(self.limits)
        session = self.parts.resting(owner, session_id)
        if session.settings.is_pinned != pinned:
            session.settings.is_pinned = pinned
            self._cool(session)
            self.parts.logs.touch(session)
        return session.view()

    def _warm(self, session: Session) -> None:
        link, copy, num_tokens = self.parts.link, session.copy, len(session.transcript)
        is_known = copy.known_len(link.generation) is not None
        is_at_rest = session.is_idle and session.closing is None
        copies = self.drafts.copies
        may_be_kept = num_tokens > 0 and copies.may_leave_kv(session.life.last_active_s)
        if not (may_be_kept and is_at_rest) or (is_known and copy.state == "resident"):
            return
        with contextlib.suppress(EngineUnavailable):
            copies.open(session, num_tokens)
            link.send(WarmSession(session_id=copy.session_id))

    def _cool(self, session: Session) -> None:
        """Have the engine forget the session; its next turn opens it again, with its tokens. A
        draft ends: the engine answers none of a session that it has forgotten."""
        self.drafts.stop(session)
        link, copy = self.parts.link, session.copy
        if copy.known_len(link.generation) is not None:
            self.drafts.copies.send_close(session, comes_back=True)
            copy.set_known_len(None, link.generation)
        self.parts.mark_cold(session)
