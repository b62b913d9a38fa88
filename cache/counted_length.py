"""`CountedLength`: a length that grows by itself, or together with others by one shared number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(slots=True, eq=False)
class SharedCount:
    """Count what is added to several lengths at once, see `cache.lockstep`."""

    value: int = 0


_NOTHING: Final = SharedCount()


class CountedLength:
    """Hold `computed_len`: a number of its own, plus the count that it shares with others."""

    __slots__ = ("_count", "_own_len")

    def __init__(self) -> None:
        self._own_len, self._count = 0, _NOTHING

    @property
    def computed_len(self) -> int:
        """Return the tokens whose KV is valid."""
        return self._own_len + self._count.value

    @computed_len.setter
    def computed_len(self, length: int) -> None:
        """Set it, whatever the shared count is."""
        self._own_len = length - self._count.value

    def count_with(self, count: SharedCount) -> None:
        """Let it grow with a shared count from now on."""
        self._own_len, self._count = self.computed_len - count.value, count
