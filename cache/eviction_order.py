"""`EvictionOrder`: order the evictable edges of the tree, the least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from cache.errors import AuditFailed
from cache.radix_node import RadixNode

_MIN_BOUND: Final = 1024


class EvictionOrder:
    """Keep a heap of offered edges by last use, then by order of offering.

    An offer is stale once its edge was used again or is no longer evictable; stale offers stay in
    the heap until they are popped or dropped.
    """

    def __init__(self, is_evictable: Callable[[RadixNode], bool]) -> None:
        """`is_evictable`: whether an edge has evictable pages; False for a removed edge."""
        self._is_evictable = is_evictable
        self._offers: list[tuple[int, int, RadixNode]] = []
        self._bound = _MIN_BOUND
        self._num_offered = 0

    def offer(self, node: RadixNode) -> None:
        """Enter an edge that has evictable pages."""
        self._num_offered += 1
        heapq.heappush(self._offers, (node.last_used, self._num_offered, node))
        if len(self._offers) > self._bound:
            self._drop_stale()

    def pop(self) -> RadixNode:
        """Remove and return the least recently used evictable edge. Offer it again if it keeps
        evictable pages.

        Raises:
            AuditFailed: no edge is evictable; the caller checks the ledger before.
        """
        while self._offers:
            last_used, _, node = heapq.heappop(self._offers)
            if last_used == node.last_used and self._is_evictable(node):
                return node
        raise AuditFailed("nothing is evictable, though the ledger says so")

    def _drop_stale(self) -> None:
        """Keep one valid offer per edge. Called when the heap has doubled, so amortized O(1)."""
        kept: dict[RadixNode, tuple[int, int, RadixNode]] = {}
        for offer in sorted(self._offers):
            last_used, _, node = offer
            if last_used == node.last_used and self._is_evictable(node):
                kept.setdefault(node, offer)
        self._offers = list(kept.values())  # in order, so a heap already
        self._bound = max(_MIN_BOUND, 2 * len(kept))
