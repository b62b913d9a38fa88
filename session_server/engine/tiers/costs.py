"""`TierCosts`: whether to copy KV back or to compute it again."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

_WEIGHT: Final = 0.2
"""Of the newest measurement."""

_MIN_PREFILL: Final = 32
"""Tokens of a forward that says something about the speed of prompts."""

_MIN_COPY_BYTES: Final = 1 << 16
"""Bytes of a copy that says something about the bandwidth."""

_FORGIVING: Final = 1.02
"""By how much a bandwidth is taken to have grown whenever nothing is copied because of it. It is
measured by copies alone, so one bad second of a disk would keep it from being used for ever."""

_ORDER_S: Final = 1e-3
"""Seconds that any copy takes: two changes of threads and a step."""


class Route(enum.Enum):
    """Say from where to where bytes go."""

    OUT = "out"
    """From the pools to host memory."""

    IN = "in"
    """From host memory to the pools."""

    READ = "read"
    """From the disk to host memory: whole files, however few of their pages are wanted."""


Load = Mapping[Route, int]
"""Bytes that a copy moves on each route."""


class TierCosts:
    """Compare bytes / bandwidth with tokens / speed of prompts. Both are corrected by every copy
    and every forward; what was not measured yet is taken to be worth a try.

    `prefill_per_s`: tokens per second; `bytes_per_s`: of each route that was measured.
    """

    def __init__(self) -> None:
        self.prefill_per_s: float | None = None
        self.bytes_per_s: dict[Route, float] = {}

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a forward that computed so many positions of prompts."""
        if num_tokens >= _MIN_PREFILL and seconds > 0:
            self.prefill_per_s = _mean(self.prefill_per_s, num_tokens / seconds)

    def note_copy(self, route: Route, num_bytes: int, seconds: float) -> None:
        """Take the time that so many bytes took on one route."""
        if num_bytes >= _MIN_COPY_BYTES and seconds > 0:
            measured = self.bytes_per_s.get(route)
            self.bytes_per_s[route] = _mean(measured, num_bytes / seconds)

    def is_worth(self, num_tokens: int, load: Load) -> bool:
        """Return whether copying so many bytes takes less time than computing the tokens."""
        if self.prefill_per_s is None:
            return num_tokens > 0
        return self._copy_s(load) < num_tokens / self.prefill_per_s

    def forgive(self, num_tokens: int, load: Load) -> None:
        """Take note that nothing was copied because it was not worth it."""
        if self.prefill_per_s is not None and num_tokens / self.prefill_per_s > _ORDER_S:
            for route in load.keys() & self.bytes_per_s.keys():
                self.bytes_per_s[route] *= _FORGIVING

    def _copy_s(self, load: Load) -> float:
        per_s = self.bytes_per_s
        times_s = [load[route] / per_s[route] for route in load.keys() & per_s.keys()]
        return _ORDER_S + sum(times_s) if times_s else 0.0


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * newest
