"""`DiskWatch`: whether the disk answers, so that no turn waits for one that does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cache.types import PoolName
from session_server.core.tier_orders import CopyIn, Forget, TierOrder, WriteFile, uses_disk

DISK_WAIT_S: Final = 10.0
"""Seconds that the disk may say nothing while something is asked of it. Then turns compute."""

_SLOW_DISK_PER_S: Final = 100 << 20
"""Bytes per second of the slowest disk that is waited for: a long copy takes longer."""


class DiskWatch:
    """Follow what is asked of the disk. `is_silent`: it has said nothing for too long, so nothing
    is read of it until it answers. What is asked of it waits in line, so any answer counts."""

    def __init__(self, page_bytes: Mapping[PoolName, int]) -> None:
        """Begin with nothing asked. `page_bytes`: of one page of each pool."""
        self._page_bytes = page_bytes
        self._asked: dict[int, int] = {}
        self._heard_s = 0.0
        self.is_silent = False

    @property
    def due_s(self) -> float | None:
        """Return when it is silent unless it answers; None if it need not, or is already."""
        if not self._asked or self.is_silent:
            return None
        return self._heard_s + DISK_WAIT_S + max(self._asked.values()) / _SLOW_DISK_PER_S

    def ask(self, order: TierOrder, now_s: float) -> None:
        """Note an order, which may be none of the disk's."""
        if isinstance(order, Forget) or not uses_disk(order):
            return
        if not self._asked:
            self._heard_s = now_s
        self._asked[order.number] = self._bytes_of(order)

    def answer(self, number: int, now_s: float) -> None:
        """Note the result of an order, which may be none of the disk's."""
        if self._asked.pop(number, None) is not None:
            self._heard_s, self.is_silent = now_s, False

    def falls_silent(self, now_s: float) -> bool:
        """Return whether it is silent from now on."""
        has_fallen = self.due_s is not None and now_s >= self.due_s
        self.is_silent |= has_fallen
        return has_fallen

    def _bytes_of(self, order: TierOrder) -> int:
        match order:
            case WriteFile(num_bytes=num_bytes):
                return num_bytes
            case CopyIn(parts=parts):
                pages = ((pool, ids) for part in parts for pool, (_, ids) in part.pages.items())
                return sum(len(ids) * self._page_bytes[pool] for pool, ids in pages)
            case _:
                return 0
