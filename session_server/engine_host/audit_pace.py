"""`AuditPace`: when the engine's thread recounts memory. Pure: the loop passes the time."""

from __future__ import annotations

from typing import Final

REST_DELAY_S: Final = 0.5
"""Rest before an audit begins; a prompt next turn is not kept waiting by its first slice."""

MAX_AUDIT_DELAY_S: Final = 30.0
"""An engine that never rests begins an audit this long after the last one ended."""

REST_PAUSE_RATIO: Final = 1.0
BUSY_PAUSE_RATIO: Final = 20.0
"""Between two slices passes this many times as long as a slice took: an engine that works spends at
most a twentieth of its thread's time on an audit."""

AUDIT_PAUSE_RATIO: Final = 50.0
"""Between two audits passes this many times as long as the slices of the last one took."""


class AuditPace:
    """Decide when the next slice of an audit runs, if nothing else comes up before."""

    def __init__(self, now_s: float) -> None:
        self._next_audit_s = now_s
        self._latest_audit_s = now_s + MAX_AUDIT_DELAY_S
        self._spent_s = 0.0
        self._slice_s = 0.0
        self._slice_ended_s = now_s
        self._is_under_way = False

    def wait_s(self, now_s: float, idle_since_s: float, *, is_at_rest: bool) -> float:
        """Return how long to wait for other work before a slice runs; 0 if it may run now.

        Args:
            now_s: the time.
            idle_since_s: since when the thread has had nothing else to do.
            is_at_rest: whether the engine has no turn at all.
        """
        if self._is_under_way:
            ratio = REST_PAUSE_RATIO if is_at_rest else BUSY_PAUSE_RATIO
            due_s = self._slice_ended_s + ratio * self._slice_s
        elif is_at_rest:
            due_s = max(self._next_audit_s, min(idle_since_s + REST_DELAY_S, self._latest_audit_s))
        else:
            due_s = max(self._next_audit_s, self._latest_audit_s)
        return max(0.0, due_s - now_s)

    def note_slice(self, started_s: float, ended_s: float, *, is_complete: bool) -> None:
        """Record a slice that has run."""
        self._slice_s, self._slice_ended_s = ended_s - started_s, ended_s
        self._spent_s += self._slice_s
        self._is_under_way = not is_complete
        if is_complete:
            self._next_audit_s = ended_s + AUDIT_PAUSE_RATIO * self._spent_s
            self._latest_audit_s = ended_s + MAX_AUDIT_DELAY_S
            self._spent_s = 0.0
