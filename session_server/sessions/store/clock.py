"""`StoreClock`: the time by which sessions on disk expire, and when the wall clock is believed.

A wall clock may be wrong: years behind with a dead battery, hours behind in a machine that slept,
ahead, and put right by NTP some minutes later. What it says alone ends no session at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

JUMP_S: Final = 300.0
"""By how much the wall clock may differ from the time that has passed, and be believed at once."""

GRACE_S: Final = 3600.0
"""For how long it must say so, while a server runs, before a session on disk ends by what it says
beyond that."""

NOTED_S: Final = 60.0
"""How much time passes at least between two notes of it on disk."""

EARLIEST_S: Final = 2.0
"""The time of a store with sessions where none was noted: behind that of what is retired."""


class StoreClock:
    """Tell the time of a store: no less than is known to have passed.

    It goes on from a time that is past, `since_s`, as the monotonic `clock` does, and follows the
    wall clock (`wall`) where that differs little. Where the wall clock is ahead, by the time that
    the server was away or by a mistake, it follows after `GRACE_S` in which that stays so. It never
    goes back to a wall clock that is behind.
    """

    def __init__(
        self, since_s: float, *, wall: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._wall, self._clock = wall, clock
        self._offset_s = since_s - clock()
        self.noted_s = -math.inf
        self._doubted_s: float | None = None
        self._doubted_since_s = 0.0

    def now_s(self) -> float:
        """Return the time: what expires before it is over."""
        return self._clock() + self._offset_s

    def end_s(self, left_s: float) -> float:
        """Return when that ends which has so many seconds left."""
        # By a wall clock that is ahead, because that may be right: it is believed some time later.
        return max(self.now_s(), self._wall()) + left_s

    def left_s(self, end_s: float) -> float:
        """Return how many seconds are left until a time. What is over by the wall clock alone has
        what it would have if no time had passed without a server."""
        by_wall_s = end_s - self.end_s(0.0)
        return by_wall_s if by_wall_s > 0.0 else end_s - self.now_s()

    def watch(self) -> float:
        """Follow the wall clock, if it is believed; call it now and then. Return by how much it is
        ahead if that is doubted from now on (behind: less than 0), else 0."""
        clock_s, offset_s = self._clock(), self._wall() - self._clock()
        ahead_s = offset_s - self._offset_s
        is_same = self._doubted_s is not None and abs(offset_s - self._doubted_s) <= JUMP_S
        is_right = is_same and ahead_s > 0.0 and clock_s >= self._doubted_since_s + GRACE_S
        if abs(ahead_s) <= JUMP_S or is_right:
            # Not back by a little either: what has expired by it may be half deleted.
            self._offset_s, self._doubted_s = max(self._offset_s, offset_s), None
            return 0.0
        if is_same:
            return 0.0
        self._doubted_s, self._doubted_since_s = offset_s, clock_s
        return ahead_s

    def doubt_anew(self) -> None:
        """Begin anew with the next `watch` where the wall clock is doubted: nobody was told."""
        self._doubted_s = None

    def must_note(self) -> bool:
        """Return whether the time is to be noted on disk again, and count it as noted."""
        is_due = self.now_s() >= self.noted_s + NOTED_S
        if is_due:
            self.noted_s = self.now_s()
        return is_due
