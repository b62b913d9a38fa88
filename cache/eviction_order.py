"""`EvictionOrder`: which edges of the tree may go, the least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from cache.errors import AuditFailed
from cache.radix_node import RadixNode

_MIN_BOUND: Final = 1024


class EvictionOrder:
    """A heap of offers by last use, and among equals by when they were made.

    An offer whose edge was used since, or may not go any more, is stale and stays behind.
    """

    __slots__ = ("_bound", "_is_evictable", "_num_offered", "_offers")

    def __init__(self, is_evictable: Callable[[RadixNode], bool]) -> None:
        """`is_evictable`: whether an edge can give something; not for one that was removed."""
        self._is_evictable = is_evictable
        self._offers: list[tuple[int, int, RadixNode]] = []
        self._bound = _MIN_BOUND
        self._num_offered = 0

    def offer(self, node: RadixNode) -> None:
        """Put an edge that may go in its place."""
        self._num_offered += 1
        heapq.heappush(self._offers, (node.last_used, self._num_offered, node))
        if len(self._offers) > self._bound:
            self._drop_stale()

    def pop(self) -> RadixNode:
        """Take out the edge that goes next; what it has left is to be offered again.

        Raises:
            AuditFailed: none may go; the caller checks the ledger before.
        """
        while self._offers:
            last_used, _, node = heapq.heappop(self._offers)
            if last_used == node.last_used and self._is_evictable(node):
                return node
        raise AuditFailed("nothing is evictable, though the ledger says so")

    def _drop_stale(self) -> None:
        """Keep the first offer of every edge that stands. Done whenever the heap has doubled, this
        costs O(1) amortised."""
        kept: dict[RadixNode, tuple[int, int, RadixNode]] = {}
        for offer in sorted(self._offers):
            last_used, _, node = offer
            if last_used == node.last_used and self._is_evictable(node):
                kept.setdefault(node, offer)
        self._offers = list(kept.values())  # in order, so a heap already
        self._bound = max(_MIN_BOUND, 2 * len(kept))
