"""`PlaceCounter`: number what a server opens, as no other server of its store does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SLOTS: Final = 1024
"""Replicas of one store, each of which has places that no other one gives."""


class PlaceCounter:
    """Give places that count up from one behind the last one that is known.

    They are microseconds of the wall clock: a plain count would show clients how many others open.
    A replica gives those of its slot alone, one of `SLOTS` in a microsecond; `slot` returns it,
    which is another one after its lease was lost. Its microseconds are those of the database, which
    `clock` returns: wall clocks of machines differ, and are set back.
    """

    def __init__(
        self,
        last: int = 0,
        slot: Callable[[], int] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._last, self._slot, self._clock = last, slot, clock

    @property
    def is_shared(self) -> bool:
        """Return whether other servers give places too."""
        return self._slot is not None

    def next(self, now_s: float) -> int:
        """Return the next place, at a time in seconds since 1970 by the clock of this machine."""
        now = int((now_s if self._clock is None else self._clock()) * 1e6)
        if self._slot is None:
            self._last = max(self._last + 1, now)
        else:
            self._last = max(self._last // SLOTS + 1, now) * SLOTS + self._slot()
        return self._last
