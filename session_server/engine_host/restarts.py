"""`Restarts`: when an engine that died is started again, and when no more. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Configure how often and how soon an engine is restarted.

    A failure is a death within `stable_s` of the start before any turn finished, or a start that
    did not succeed. The pause before a restart doubles with every failure in a row, from
    `backoff_first_s` to `backoff_max_s`. After `max_failures` in a row the engine is not restarted.
    """

    backoff_first_s: float = 0.5
    backoff_max_s: float = 30.0
    stable_s: float = 60.0
    max_failures: int = 5


class Restarts:
    """Count failures in a row."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._num_failures = 0

    @property
    def is_given_up(self) -> bool:
        """Return whether the engine is not started again."""
        return self._num_failures > self._policy.max_failures

    @property
    def pause_s(self) -> float:
        """Return the seconds to wait before the next start."""
        exponent = min(self._num_failures - 1, 32)
        return min(self._policy.backoff_first_s * 2.0**exponent, self._policy.backoff_max_s)

    def note_death(self, lived_s: float, *, has_finished_turn: bool) -> None:
        """Count the death of an engine that had started.

        A turn that finished, or a long life, ends the row: an engine that is killed again and again
        still serves in between.
        """
        was_useful = has_finished_turn or lived_s >= self._policy.stable_s
        self._num_failures = 1 if was_useful else self._num_failures + 1

    def note_failed_start(self) -> None:
        """Count a start that did not succeed."""
        self._num_failures += 1
