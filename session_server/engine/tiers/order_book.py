"""`OrderBook`: the orders of the tiers that were not taken yet, and who waits for their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cache.types import PoolName
from session_server.core.tier_orders import Forget, TierOrder, TierResult
from session_server.engine.tiers.disk_watch import DiskWatch

Continue = Callable[[TierResult], None]

GiveUp = Callable[[], Continue]
"""Go on without the result of an order; returns what handles it if it comes after all."""


class OrderBook:
    """Hold orders in order. What is to be forgotten between two others is one order."""

    def __init__(self, page_bytes: Mapping[PoolName, int]) -> None:
        """Begin without any. `page_bytes`: of one page of each pool."""
        self.disk_watch = DiskWatch(page_bytes)
        self._orders: list[TierOrder] = []
        self._continue: dict[int, Continue] = {}
        self._give_up: dict[int, GiveUp] = {}
        self._num_made = 0
        self._segments: list[int] = []
        self._files: list[bytes] = []

    def __len__(self) -> int:
        """Return the orders that were not taken."""
        return len(self._orders) + bool(self._segments or self._files)

    def add(
        self, make: Callable[[int], TierOrder], then: Continue, *, give_up: GiveUp | None = None
    ) -> None:
        """Order something, by its number, and have its result handled. Where the disk does not
        answer, `give_up` is called; None: nobody waits."""
        self._close_forgotten()
        self._num_made += 1
        self._continue[self._num_made] = then
        if give_up is not None:
            self._give_up[self._num_made] = give_up
        self._orders.append(make(self._num_made))

    def forget_in_host(self, segment: int) -> None:
        """Have a segment dropped from host memory."""
        self._segments.append(segment)

    def forget_file(self, file_id: bytes) -> None:
        """Have a file removed."""
        self._files.append(file_id)

    def forget_all_in_host(self) -> None:
        """Have all segments dropped from host memory."""
        self._close_forgotten()
        self._orders.append(Forget(all_segments=True))

    def forget_all_files(self) -> None:
        """Have all files removed."""
        self._close_forgotten()
        self._orders.append(Forget(all_files=True))

    def take(self) -> list[TierOrder]:
        """Return the orders since the last call, in order."""
        self._close_forgotten()
        if not self._orders:
            return []
        orders, self._orders = self._orders, []
        return orders

    def handle(self, result: TierResult) -> None:
        """Handle the result of an order."""
        self._give_up.pop(result.number, None)
        self._continue.pop(result.number)(result)

    def give_up(self) -> None:
        """Go on without the disk, which is silent."""
        waiting, self._give_up = self._give_up, {}
        for number, give_up in waiting.items():
            self._continue[number] = give_up()

    def _close_forgotten(self) -> None:
        if self._segments or self._files:
            self._orders.append(Forget(tuple(self._segments), tuple(self._files)))
            self._segments, self._files = [], []
