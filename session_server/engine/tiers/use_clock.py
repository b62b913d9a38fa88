"""`UseClock`: tell when KV was used, so that no two uses are at the same time."""

from __future__ import annotations

from typing import Final

_USE_NS: Final = 1 << 16
"""Nanoseconds between two uses: the segments of one path are told apart by one each."""


class UseClock:
    """Give times of uses, in nanoseconds of the engine's clock, each later than the one before."""

    def __init__(self) -> None:
        self._now_ns = self._last_ns = 0

    def set(self, now_s: float) -> None:
        """Set the clock. One that goes back is not followed."""
        self._now_ns = max(self._now_ns, round(now_s * 1e9))

    @property
    def now_s(self) -> float:
        """Return what the clock was set to last."""
        return self._now_ns / 1e9

    def next_use(self) -> int:
        """Return when something is used that is used now."""
        self._last_ns = max(self._now_ns, self._last_ns + _USE_NS)
        return self._last_ns
