"""`TierCosts`: whether to copy KV back or to compute it again."""

from __future__ import annotations

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


class TierCosts:
    """Compare bytes / bandwidth with tokens / speed of prompts. Both are corrected by every copy
    and every forward; what was not measured yet is taken to be worth a try.

    `prefill_per_s`: tokens per second; `host_per_s`, `disk_per_s`: bytes per second.
    """

    def __init__(self) -> None:
        self.prefill_per_s: float | None = None
        self.host_per_s: float | None = None
        self.disk_per_s: float | None = None

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a forward that computed so many positions of prompts."""
        if num_tokens >= _MIN_PREFILL and seconds > 0:
            self.prefill_per_s = _mean(self.prefill_per_s, num_tokens / seconds)

    def note_copy(self, num_bytes: int, seconds: float, *, from_disk: bool) -> None:
        """Take the time of a copy back into the pools."""
        if num_bytes < _MIN_COPY_BYTES or seconds <= 0:
            return
        if from_disk:
            self.disk_per_s = _mean(self.disk_per_s, num_bytes / seconds)
        else:
            self.host_per_s = _mean(self.host_per_s, num_bytes / seconds)

    def is_worth(self, num_tokens: int, num_bytes: int, *, from_disk: bool) -> bool:
        """Return whether copying so many bytes takes less time than computing the tokens."""
        per_s = self.disk_per_s if from_disk else self.host_per_s
        if self.prefill_per_s is None or per_s is None:
            return num_tokens > 0
        num_left_s = num_tokens / self.prefill_per_s - _ORDER_S
        if num_bytes / per_s < num_left_s:
            return True
        if num_left_s > 0:
            self._forgive(from_disk=from_disk)
        return False

    def _forgive(self, *, from_disk: bool) -> None:
        if from_disk and self.disk_per_s is not None:
            self.disk_per_s *= _FORGIVING
        elif self.host_per_s is not None:
            self.host_per_s *= _FORGIVING


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else (1 - _WEIGHT) * mean + _WEIGHT * newest
