"""Find expired idle sessions without looking at the others.

A timing wheel maps whole seconds to sessions; a heap of its keys gives the next second that is due.
Each session is filed under a second that is not later than its own deadline. A turn that ends or a
longer time to live moves only the deadline: once the filed second comes, the session is filed again
under the right one. A shorter time to live files the session a second time and makes its earlier
element void; a sweep removes void elements once they outnumber the others.
"""

from __future__ import annotations

import heapq
import math
from typing import Final
from weakref import ref

from session_server.sessions.backlog import SLICE
from session_server.sessions.session import Session

_MIN_SWEEP: Final = 1024


class Deadlines:
    """Track the deadlines of open sessions, by weak references."""

    def __init__(self) -> None:
        self._wheel: dict[int, list[ref[Session]]] = {}
        self._seconds: list[int] = []
        """A heap of the wheel's keys: few, whatever the number of sessions."""

        self._num_elements = 0
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        return self._num_elements

    def watch(self, session: Session) -> None:
        """Register a new session, or one whose time to live has changed."""
        if math.ceil(session.expires_s) < session.life.deadline_s:
            self._put(session, session.expires_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether any session may have expired."""
        return bool(self._seconds) and self._seconds[0] < now_s

    def pop_expired(self, now_s: float) -> list[Session]:
        """Remove and return expired sessions, looking at no more than `SLICE` elements.

        Call it again while `is_due`.
        """
        expired: list[Session] = []
        for _ in range(SLICE):
            if not self.is_due(now_s):
                break
            session = self._take()
            if session is None:
                continue
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
        if second not in self._wheel:
            self._wheel[second] = []
            heapq.heappush(self._seconds, second)
        self._wheel[second].append(ref(session))
        self._num_elements += 1
        if self._num_elements > self._sweep_at:
            self._sweep()

    def _take(self) -> Session | None:
        """Remove one element of the first second; return its session, or None if it is void."""
        second = self._seconds[0]
        weak = self._wheel[second].pop()
        self._num_elements -= 1
        if not self._wheel[second]:
            del self._wheel[second]
            heapq.heappop(self._seconds)
        return _valid(weak, second)

    def _sweep(self) -> None:
        for second, elements in self._wheel.items():
            elements[:] = [weak for weak in elements if _valid(weak, second) is not None]
        self._wheel = {second: left for second, left in self._wheel.items() if left}
        self._seconds = sorted(self._wheel)
        self._num_elements = sum(map(len, self._wheel.values()))
        self._sweep_at = 2 * self._num_elements + _MIN_SWEEP


def _valid(weak: ref[Session], second: int) -> Session | None:
    """Return the session of an element, or None if the element is void or the session is closed."""
    session = weak()
    if session is None or session.closing is not None or session.life.deadline_s != second:
        return None
    return session
