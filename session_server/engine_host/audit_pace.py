"""`AuditPace`: when the engine's thread recounts memory. Pure: the loop passes the time."""

from __future__ import annotations

from typing import Final

REST_DELAY_S: Final = 0.5
"""Seconds of rest before an audit begins, so that its first slice does not delay a quick turn."""

MAX_AUDIT_DELAY_S: Final = 30.0
"""Seconds after an audit when the next one begins even if the engine never rests."""

REST_PAUSE_RATIO: Final = 1.0
BUSY_PAUSE_RATIO: Final = 20.0
"""Pause between two slices, as a multiple of the time that a slice took. A busy engine spends at
most a twentieth of its thread's time on an audit."""

AUDIT_PAUSE_RATIO: Final = 50.0
"""Pause between two audits, as a multiple of the time that the slices of the last one took."""


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

        The thread has had nothing else to do since `idle_since_s`. An engine at rest has no turn.
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
