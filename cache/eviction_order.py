"""`EvictionOrder`: order the evictable edges of the tree, the least recently used first."""

from __future__ import annotations

from collections.abc import Callable

from cache.errors import AuditFailed
from cache.lazy_heap import LazyHeap
from cache.radix_node import RadixNode


class EvictionOrder:
    """Keep offered edges by last use, then by order of offering.

    An offer is void once its edge was used again or is no longer evictable; void offers stay until
    they are popped or swept.
    """

    def __init__(self, is_evictable: Callable[[RadixNode], bool]) -> None:
        """`is_evictable`: whether an edge has evictable pages; False for a removed edge."""
        self._is_evictable = is_evictable
        self._offers: LazyHeap[RadixNode] = LazyHeap(self._is_valid)
        self._num_offered = 0

    def offer(self, node: RadixNode) -> None:
        """Enter an edge that has evictable pages."""
        if self._offers.priority(node) != node.last_used:
            self._num_offered += 1
            self._offers.push(node, node.last_used, self._num_offered)

    def pop(self) -> RadixNode:
        """Remove and return the least recently used evictable edge. Offer it again if it keeps
        evictable pages.

        Raises:
            AuditFailed: no edge is evictable; the caller checks the ledger before.
        """
        while (node := self._offers.first()) is not None:
            is_valid = self._is_valid(node)
            self._offers.remove(node)
            if is_valid:
                return node
        raise AuditFailed("nothing is evictable, though the ledger says so")

    def _is_valid(self, node: RadixNode) -> bool:
        return self._offers.priority(node) == node.last_used and self._is_evictable(node)
