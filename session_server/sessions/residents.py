"""`Residents`: the sessions whose KV the engine holds, and why sessions have lost theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from session_server.core.session_events import SessionStateChanged, StateReason
from session_server.sessions.quotas import Quotas
from session_server.sessions.session import Session


class Residents:
    """Journal, once each time, that a session has KV or has lost it. `evictions`: how often it was
    lost, by reason."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._sessions: dict[Session, None] = {}
        self.evictions: Counter[StateReason] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def mark_resident(self, session: Session) -> None:
        """Note that a turn runs in the session; after it was cold, its readers are told."""
        if session not in self._sessions:
            self._lose(session)
        if session.copy.state == "cold":
            session.journal.append(SessionStateChanged("resident", "turn"))
        session.copy.state = "resident"
        self._sessions[session] = None

    def mark_cold(self, session: Session, reason: StateReason = "client") -> None:
        """Note that the session's KV is gone."""
        self._sessions.pop(session, None)
        if session.copy.state == "resident" and not session.journal.is_closed:
            session.copy.state = "cold"
            self.evictions[reason] += 1
            if session.live is None or session.live.submitted is None:
                self._quotas.rest_kv(session)  # of a turn that was sent, its end counts anew
            session.journal.append(SessionStateChanged("cold", reason))

    def drop(self, session: Session) -> None:
        """Forget a session that has closed."""
        self._sessions.pop(session, None)

    def lose_all(self) -> Iterator[Callable[[], None]]:
        """Note that the engine is gone; each call that is yielded tells one session's readers."""
        lost, self._sessions = self._sessions, {}
        return (partial(self._lose, session) for session in lost)

    def _lose(self, session: Session) -> None:
        """Journal that the KV is lost, unless readers know or a new engine holds KV again."""
        if session not in self._sessions:
            self.mark_cold(session, "engine_restart")
