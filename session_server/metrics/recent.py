"""Hold what happened since somebody last looked: for a view that is drawn again every second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_RECENT_TURNS: Final = 512
"""Times to the first token that are kept between two looks."""


@dataclass(frozen=True, slots=True)
class RecentTimes:
    """Hold the largest lag of the event loop, in seconds, and of the turns that ended the times
    from the request to the first token, ascending, in milliseconds."""

    lag_s: float
    ttft_ms: tuple[float, ...]


class Recent:
    """Collect times until they are taken; the first `MAX_RECENT_TURNS` of those of turns."""

    def __init__(self) -> None:
        self._lag_s = 0.0
        self._ttft_ms: list[float] = []

    def note_lag(self, lag_s: float) -> None:
        """Add a lag of the event loop."""
        self._lag_s = max(self._lag_s, lag_s)

    def note_first_token(self, ttft_ms: float) -> None:
        """Add a turn that has ended."""
        if len(self._ttft_ms) < MAX_RECENT_TURNS:
            self._ttft_ms.append(ttft_ms)

    def take(self) -> RecentTimes:
        """Return what was collected, and begin anew."""
        taken = RecentTimes(self._lag_s, tuple(sorted(self._ttft_ms)))
        self._lag_s, self._ttft_ms = 0.0, []
        return taken
