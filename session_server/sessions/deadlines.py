"""Find expired idle sessions without looking at the others.

A timing wheel maps whole seconds to sessions. Each session is filed once, under a second that is
not later than its own deadline. A turn that ends or a longer time to live moves only the deadline:
once the filed second comes, the session is filed again under the right one.
"""

from __future__ import annotations

import math

from session_server.sessions.backlog import SLICE
from session_server.sessions.session import Session


class Deadlines:
    """Track the deadlines of open sessions."""

    def __init__(self) -> None:
        self._wheel: dict[float, dict[Session, None]] = {}
        self._next_s = 0
        """No session is filed under an earlier second."""

    def watch(self, session: Session) -> None:
        """Register a new session, or one whose time to live has changed."""
        if math.ceil(session.expires_s) < session.life.deadline_s:
            self.remove(session)
            self._put(session, session.expires_s)

    def remove(self, session: Session) -> None:
        """Remove a session, if it is filed."""
        filed = self._wheel.get(session.life.deadline_s, {})
        filed.pop(session, None)
        if not filed:
            self._wheel.pop(session.life.deadline_s, None)

    def is_due(self, now_s: float) -> bool:
        """Return whether any session may have expired; look once at each second that passes."""
        if self._wheel and now_s - self._next_s > len(self._wheel):
            self._next_s = int(
                min(self._wheel)
            )  # the clock has leaped over more than there is to see
        while self._wheel and self._next_s < now_s:
            if self._next_s in self._wheel:
                return True
            self._next_s += 1
        return False

    def pop_expired(self, now_s: float) -> list[Session]:
        """Remove and return expired sessions, looking at no more than `SLICE`.

        Call it again while `is_due`.
        """
        expired: list[Session] = []
        for _ in range(SLICE):
            if not self.is_due(now_s):
                break
            session = self._take()
            if not session.is_idle:
                # Its time to live starts when its last turn ends, which is later than now.
                self._put(session, now_s + session.settings.ttl_s)
            elif session.expires_s < now_s:
                expired.append(session)
            else:
                self._put(session, max(session.expires_s, now_s))
        return expired

    def _put(self, session: Session, deadline_s: float) -> None:
        second = math.ceil(deadline_s)
        session.life.deadline_s = second
        self._next_s = min(self._next_s, second) if self._wheel else second
        self._wheel.setdefault(second, {})[session] = None

    def _take(self) -> Session:
        """Remove and return a session of the first second."""
        session = next(reversed(self._wheel[self._next_s]))
        self.remove(session)
        return session
