"""`EngineCopies`: what the engine holds of a session's history before something is built on it."""

from __future__ import annotations

from session_server.core.commands import CloseSession, OpenSession
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.prompt import Prompt
from session_server.sessions.salts import TenantSalts
from session_server.sessions.session import Session
from session_server.sessions.turn_names import TurnNames


class EngineCopies:
    """Compare histories with what the engine holds of them, and open sessions there. `names`: of
    what was built on them last."""

    def __init__(self, link: EngineLink, salts: TenantSalts) -> None:
        self._link, self._salts = link, salts
        self.names = TurnNames()

    def tag_of(self, session: Session) -> str:
        """Return the tenant of a session, as the engine knows it."""
        return self._salts.tag_of(session.owner)

    def base_len(self, session: Session, prompt: Prompt) -> int:
        """Return how many tokens of a prompt's context the engine holds of this session, or would
        hold as its history if it were opened; always fewer than all."""
        common = session.transcript.common_len(prompt)
        known = session.copy.known_len(self._link.generation)
        # A forward needs at least one query, so the last token of the context is always sent.
        return min(common if known is None else min(known, common), prompt.context_len - 1)

    def open(self, session: Session, base_len: int) -> None:
        """Let the engine know the session; a new one gets the first `base_len` tokens of the
        history. Raises EngineUnavailable."""
        copy = session.copy
        if copy.known_len(self._link.generation) is not None:
            return
        self._link.send(
            OpenSession(
                session_id=copy.session_id,
                tenant_salt=self._salts.salt_of(session.owner, session.session_id),
                tenant=self.tag_of(session),
                tenant_weight=max(1, round(session.owner.share * 1000)),
                tokens=session.transcript.tokens(0, base_len),
                pinned=session.settings.is_pinned,
            )
        )
        copy.set_known_len(base_len, self._link.generation)

    def close(self, session: Session) -> None:
        """Let the engine forget a session. One that does not come back leaves no KV anywhere."""
        copy, log = session.copy, session.life.log
        comes_back = log is not None and session.closing in (None, "draining")
        if copy.known_len(self._link.generation) is not None:
            self._link.send_or_queue(
                CloseSession(session_id=copy.session_id, is_deleted=not comes_back)
            )
