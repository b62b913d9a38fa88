"""`TierPace`: how much one step does of what grows with what is kept, and what is left of it."""

from __future__ import annotations

from typing import Any, Final

NUM_PER_STEP: Final = 512
"""Files that are entered or give way, or segments that are let go of or passed over, in one step:
some milliseconds."""


class TierPace:
    """Count what a step may still do, and hold what was dropped at once, to be let go of one at a
    time. `is_spent`: something was put off, because the step has done its share."""

    def __init__(self) -> None:
        self._num_left = NUM_PER_STEP
        self._dropped: list[dict[Any, Any]] = []

    @property
    def is_spent(self) -> bool:
        """Return whether something was put off to the next step."""
        return self._num_left < 0

    @property
    def has_dropped(self) -> bool:
        """Return whether something that was dropped may be left."""
        return bool(self._dropped)

    def begin_step(self) -> bool:
        """Begin another step, or a further part of one; return whether the one before was spent."""
        was_spent, self._num_left = self.is_spent, NUM_PER_STEP
        return was_spent

    def take(self) -> bool:
        """Return whether one thing more may be done, and count it; else it is put off."""
        self._num_left -= 1
        return not self.is_spent

    def drop(self, *values: dict[Any, Any]) -> None:
        """Hold the values of these to be let go of. Whoever has a dict may take values from it."""
        self._dropped += filter(None, values)

    def next_dropped(self) -> object | None:
        """Return the next value to let go of, which nobody else holds for that any more; None if
        there is none, or this step does no more."""
        while self._dropped and not self._dropped[-1]:
            self._dropped.pop()
        return self._dropped[-1].popitem()[1] if self._dropped and self.take() else None
