"""`PageLocks`: count locks per page in bounded pools, and evict single pages from edges.

With full attention a lock covers the whole path, so one count per edge is enough. In a bounded pool
a session needs only the pages of its last window; earlier ones stay published for rewinds and other
sessions, and may be evicted at any time. So every page of an edge has its own count, and an evicted
page leaves a tombstone, as in SGLang: `NULL_PAGE` in place of its id. The count of a tombstone
starts at `TOMBSTONE_COUNT`, so a page is evictable exactly if its count is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from cache.changes import Changes
from cache.components import Component
from cache.errors import AuditFailed
from cache.int_buffer import IntBuffer
from cache.ledger import Ledger
from cache.lock_owners import LockOwners
from cache.radix_node import LockReceipt, RadixNode
from cache.tenants import Account, Tenants
from cache.types import NULL_PAGE, Pages, PoolName

TOMBSTONE_COUNT: Final = 1 << 20
"""Added to the lock count of a tombstone; far more than there can be receipts."""


class PageLocks:
    """Track which pages of bounded pools are locked, and in which order others are evicted."""

    def __init__(
        self,
        page_size: int,
        ledgers: Mapping[PoolName, Ledger],
        components: Sequence[Component],
        *,
        changes: Changes,
        owners: LockOwners,
        tenants: Tenants,
    ) -> None:
        """Lock nothing. `components`: the bounded ones. `changes`: records which edges change."""
        self._tenants = tenants
        self._changes = changes
        self._owners = owners
        self._page_size = page_size
        self._ledgers = ledgers
        self._components = tuple(components)
        self.pools: Final = tuple(c.pool for c in self._components)

    def __bool__(self) -> bool:
        """Return whether any pool is bounded."""
        return bool(self._components)

    @contextmanager
    def relocking(self, receipt: LockReceipt) -> Iterator[None]:
        """Unlock a receipt's pages, let the block change its length or mark, and lock the pages
        that forwards at the new length and mark read.
        """
        left = self._unlock_pages(receipt) if self._components else ()
        yield
        if self._components:
            self._lock_pages(receipt)
            for node in left:
                self.offer(node)  # pages of the new window are locked again by now

    def continuable(self, receipt: LockReceipt | None, nodes: Sequence[RadixNode], end: int) -> int:
        """Return the length of a path, in whole pages, that a forward can continue from.

        The path has `end` tokens: what `receipt` has locked (None at a root), then edges, of which
        it may end inside the last.
        """
        length = end
        for component in self._components:
            entries = [node.pages[component.pool].view() for node in nodes]
            first = 0
            if receipt is not None:
                # A window may begin before the receipt's end, so its locked pages count too.
                first = component.first_page(receipt.length)
                span = (first, receipt.length // self._page_size)
                above = [
                    node.pages[component.pool].view(i, j)
                    for node, i, j in self._slices(receipt, span)
                ]
                entries = above[::-1] + entries
            if entries:
                length = component.continuable_len(np.concatenate(entries), length, first=first)
                length -= length % self._page_size
        return length

    def num_unlocked(self, nodes: Sequence[RadixNode], start: int, end: int) -> dict[PoolName, int]:
        """Return, per bounded pool, the unlocked pages that a lock of length `end` would cover in
        edges that begin at token `start`."""
        counts = dict.fromkeys(self.pools, 0)
        for component in self._components:
            first, last = component.first_page(end), end // self._page_size
            at = start // self._page_size
            for node in nodes:
                i, j = max(first - at, 0), last - at
                if i < j:
                    counts[component.pool] += _num_evictable(node, component.pool, i, j)
                at += len(node.pages[component.pool])
        return counts

    def fill_tombstone(self, node: RadixNode, pool: PoolName, index: int, page: int) -> None:
        """Replace a tombstone by a page that was just booked as TREE."""
        self._changes.record_content(node)
        node.pages[pool].put(index, page)
        node.page_locks[pool].add(index, index + 1, -TOMBSTONE_COUNT)
        # A path with a tombstone can be locked: locks of the place are then locks of the page.
        num_locks = int(node.page_locks[pool].view()[index])
        if num_locks:
            self._tenants.protect(node.tenant, pool, 1)
            self._credit_sole_owners(node, pool, (index, index + 1), +1)
        else:
            node.num_evictable[pool] += 1
            self.offer(node)

    def offer(self, node: RadixNode) -> None:
        """Enter an edge into the order of eviction of every pool where it has evictable pages."""
        for pool in self.pools:
            if node.num_evictable[pool]:
                self._tenants[node.tenant].orders[pool].offer(node)

    def take_oldest(
        self, account: Account, pool: PoolName, num_pages: int
    ) -> tuple[RadixNode, list[int]]:
        """Evict pages of a tenant's least recently used edge that has evictable ones.

        The first pages of the edge go first: a match that ends at its end needs the last ones.
        Return the edge, and up to `num_pages` page ids, still booked as TREE.

        Raises:
            AuditFailed: no page is evictable; the caller checks the ledger before.
        """
        node = account.orders[pool].pop()
        self._changes.record_content(node)
        idle = (node.page_locks[pool].view() == 0).nonzero()[0][:num_pages].tolist()
        pages = node.pages[pool].view()[idle].tolist()
        for index in idle:
            node.pages[pool].put(index, NULL_PAGE)
            node.page_locks[pool].add(index, index + 1, TOMBSTONE_COUNT)
        node.num_evictable[pool] -= len(idle)
        self._tenants.add(node.tenant, pool, -len(idle))
        self.offer(node)
        return node, pages

    def _lock_pages(self, receipt: LockReceipt) -> None:
        for pool, node, start, end in self._locked_slices(receipt):
            num_evictable = _num_evictable(node, pool, start, end)
            self._record_change(node, num_evictable)
            self._tenants.protect(node.tenant, pool, num_evictable)
            node.num_evictable[pool] -= num_evictable
            self._owners.add_pages(receipt._number, pool, num_evictable)
            self._credit_sole_owners(node, pool, (start, end), -1)
            node.page_locks[pool].add(start, end, 1)
            node.page_owners[pool].exclusive_or(start, end, receipt._number)

    def _unlock_pages(self, receipt: LockReceipt) -> list[RadixNode]:
        """Unlock a receipt's pages; return the edges that may have evictable pages now."""
        left = []
        for pool, node, start, end in self._locked_slices(receipt):
            if _num_evictable(node, pool, start, end):
                raise AuditFailed(f"{pool}: a page was unlocked that was not locked")
            node.page_locks[pool].add(start, end, -1)
            node.page_owners[pool].exclusive_or(start, end, receipt._number)
            num_evictable = _num_evictable(node, pool, start, end)
            self._record_change(node, num_evictable)
            self._tenants.protect(node.tenant, pool, -num_evictable)
            node.num_evictable[pool] += num_evictable
            self._owners.add_pages(receipt._number, pool, -num_evictable)
            self._credit_sole_owners(node, pool, (start, end), +1)
            left.append(node)
        return left

    def _record_change(self, node: RadixNode, num_evictable: int) -> None:
        """Record that locks of an edge have changed, and whether `num_evictable` pages became
        evictable or ceased to be."""
        if num_evictable:
            self._changes.record_content(node)
        else:
            self._changes.record_node(node)

    def _credit_sole_owners(
        self, node: RadixNode, pool: PoolName, span: tuple[int, int], sign: int
    ) -> None:
        """Add the pages of a slice that have one lock to what their owners alone have locked; with
        sign -1 subtract them."""
        is_alone = node.page_locks[pool].view(*span) == 1
        if is_alone.any():
            numbers = node.page_owners[pool].view(*span)[is_alone]
            for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                self._owners.add_pages(int(number), pool, sign * int(count))

    def _locked_slices(
        self, receipt: LockReceipt
    ) -> Iterator[tuple[PoolName, RadixNode, int, int]]:
        """Yield every page the receipt has locked, once, as slices of edges."""
        for component in self._components:
            first, end = component.first_page(receipt.length), receipt.length // self._page_size
            spans = [(first, end)]
            if receipt.mark is not None:
                # The two windows may overlap: cut this one where the other begins.
                marked = component.first_page(receipt.mark)
                spans.append((marked, min(receipt.mark // self._page_size, first)))
            for span in spans:
                for node, i, j in self._slices(receipt, span):
                    yield component.pool, node, i, j

    def _slices(
        self, receipt: LockReceipt, span: tuple[int, int]
    ) -> Iterator[tuple[RadixNode, int, int]]:
        """Yield the slices of edges that have the pages [first, end) of a receipt's path, the last
        edge first."""
        node, at = receipt._node, receipt.length // self._page_size
        first, end = span
        while node.parent is not None and at > first:
            at -= len(node.tokens) // self._page_size
            i, j = max(first - at, 0), min(end - at, len(node.tokens) // self._page_size)
            if i < j:
                yield node, i, j
            node = node.parent


def init_locks(node: RadixNode, pools: Sequence[PoolName]) -> None:
    """Set the lock counts of a new edge to 0."""
    for pool in pools:
        node.page_locks[pool], node.page_owners[pool] = IntBuffer(), IntBuffer()
        node.num_evictable[pool] = 0
        append_locks(node, pool, node.pages[pool].view())


def append_locks(node: RadixNode, pool: PoolName, pages: Pages) -> None:
    """Append unlocked pages to an edge."""
    node.page_locks[pool].append(unlocked_counts(pages))
    node.page_owners[pool].append(np.zeros(len(pages), np.int32))
    node.num_evictable[pool] += int(np.count_nonzero(pages))


def truncate_locks(node: RadixNode, num_kept: int) -> None:
    """Cut the lock counts of an edge to its first pages."""
    for pool, locks in node.page_locks.items():
        node.num_evictable[pool] -= _num_evictable(node, pool, num_kept)
        locks.truncate(num_kept)
        node.page_owners[pool].truncate(num_kept)


def split_locks(upper: RadixNode, lower: RadixNode, num_pages: int) -> None:
    """Move the lock counts of the first pages of an edge to the new edge above it."""
    for pool, locks in lower.page_locks.items():
        owners = lower.page_owners[pool]
        upper.page_locks[pool] = IntBuffer(locks.view(0, num_pages))
        upper.page_owners[pool] = IntBuffer(owners.view(0, num_pages))
        upper.num_evictable[pool] = _num_evictable(upper, pool)
        lower.page_locks[pool] = IntBuffer(locks.view(num_pages))
        lower.page_owners[pool] = IntBuffer(owners.view(num_pages))
        lower.num_evictable[pool] -= upper.num_evictable[pool]


def unlocked_counts(pages: Pages) -> Pages:
    """Return the lock counts of unlocked pages, int32 [n]: 0, `TOMBSTONE_COUNT` for a tombstone."""
    counts = np.zeros(len(pages), np.int32)
    if np.count_nonzero(pages) < len(pages):
        counts[pages == NULL_PAGE] = TOMBSTONE_COUNT
    return counts


def _num_evictable(node: RadixNode, pool: PoolName, start: int = 0, end: int | None = None) -> int:
    """Return how many pages of a slice are there and unlocked; 0 for a removed edge."""
    locks = node.page_locks[pool].view(start, end)
    return len(locks) - int(np.count_nonzero(locks))
