"""Level 2 of the memory check: recount everything from the structures that hold it.

A recount visits every session, every row and every edge of the tree, adds up what each of them
holds, and compares the sums at the end with the ledger, with the free list and with each other. It
uses no count that other code maintains.

It may be made in slices, see docs/memory.md: what changes after its visit is recorded in
`cache.changes` and visited again, its old record is subtracted from the sums and its new one added.
What is summed:

* Pages: how many holders each page of a pool has. With the free list and the quarantine: once.
* Locks of an edge: the receipts that end at it and the locks of the edges below it. This holds for
  both parts of an edge that is split.
* Locks of pages in bounded pools: in all as many as sessions hold, and at the same positions in
  sum; and every page that a session holds is locked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.lease import KVLease
from cache.ledger import Accounts, Ledger
from cache.page_locks import TOMBSTONE_COUNT
from cache.pair_check import Violation, slot_violations
from cache.radix_node import LockReceipt, RadixNode
from cache.session_cache import SessionAwareCache
from cache.types import NULL_PAGE, NULL_ROW, Holder, Pages, PoolName, RowId, SessionId

_PAGES_PER_UNIT: Final = 8192
"""Reading this many pages costs about as much as one visit."""

_EDGES_PER_UNIT: Final = 4
"""Comparing this many edges of a lock path costs about as much as one visit. Charged for first
visits only: later ones read what has changed, and a recount under load must come to an end."""

_FREED_PER_UNIT: Final = 16
"""Dropping this many records costs less than one visit."""

MAX_CHANGED: Final = 256
"""Visits that one slice adds for what has changed since the last, beside two for each turn, whose
session and edge may change in every step."""


PageIndices = NDArray[np.intp]
"""Page ids in no order, as numpy indexes with them: [num_pages]."""


class _Locks(NamedTuple):
    """Count locks of pages, and sum the positions of those pages on their paths."""

    num_locks: int
    positions: int


class _LeaseRecord(NamedTuple):
    """Record what one session holds, or pages on their way, which have no row. `end`: the node at
    which its receipt ends. `holder`: the account of its private pages."""

    row: RowId | None
    holder: Holder
    end: RadixNode
    private: dict[PoolName, PageIndices]
    locks: dict[PoolName, _Locks]


class _NodeRecord(NamedTuple):
    """Record what one node holds. `num_protected`: its locked pages, without tombstones."""

    parent: RadixNode | None
    lock_ref: int
    pages: dict[PoolName, PageIndices]
    num_protected: dict[PoolName, int]
    locks: dict[PoolName, _Locks]


class _PoolSums:
    """Sum what was visited of one pool. Locks count positive on edges, negative on sessions."""

    def __init__(self, num_pages: int) -> None:
        # Ids outside of the pool are counted behind its last page.
        self.num_holders = np.zeros(num_pages + 1, np.int16)
        self.private = Counter[Holder]()
        self.evictable = self.protected = 0
        self.num_locks = self.positions = 0

    def add_private(self, pages: PageIndices, sign: int, holder: Holder) -> None:
        self._count_pages(pages, sign)
        self.private[holder] += sign * len(pages)

    def add_node(self, pages: PageIndices, num_protected: int, sign: int) -> None:
        self._count_pages(pages, sign)
        self.protected += sign * num_protected
        self.evictable += sign * (len(pages) - num_protected)

    def add_locks(self, locks: _Locks, sign: int) -> None:
        self.num_locks += sign * locks.num_locks
        self.positions += sign * locks.positions

    def _count_pages(self, pages: PageIndices, sign: int) -> None:
        if not len(pages):
            return
        last = len(self.num_holders) - 1
        if pages.min() < 0 or pages.max() > last:
            pages = np.where((pages < 0) | (pages > last), last, pages)
        np.add.at(self.num_holders, pages, np.int16(sign))


class _Pending:
    """List what is still to visit. Nodes come with the parent and key they were found under."""

    def __init__(self, cache: SessionAwareCache) -> None:
        stores, slots = cache.inspect()
        self.changed = stores.changes.watch()
        self.num_left = 0
        self.sessions = [*slots, *(transit.name for transit in stores.transits.values())]
        self.num_rows = stores.rows.num_rows + 1
        self.nodes: list[tuple[RadixNode | None, bytes, RadixNode]] = [
            (None, root.key, root) for _, root in stores.tree.roots()
        ]

    @property
    def num_changed(self) -> int:
        """Return how many sessions and nodes have changed and are to be visited for that."""
        return len(self.changed.sessions) + len(self.changed.nodes)


class Recount:
    """Recount a cache: call `advance` until it is complete, then `stop`.

    `violations`: those found so far. `has_seen_changes`: whether anything changed meanwhile.
    """

    def __init__(self, cache: SessionAwareCache) -> None:
        self._cache = cache
        self._stores = cache.inspect().stores
        self.violations: list[Violation] = []
        self.has_seen_changes = False
        self._sums = {p: _PoolSums(ledger.num_pages) for p, ledger in self._stores.ledgers.items()}
        self._lock_diffs: dict[RadixNode, int] = {}  # those that are not zero
        self._leases: dict[SessionId, _LeaseRecord] = {}
        self._nodes: dict[RadixNode, _NodeRecord] = {}
        self._pending = _Pending(cache)
        self._num_walked = 0
        self._is_compared = False
        self._of_tenants: Counter[tuple[str, PoolName, bool]] = Counter()
        """Pages in the tree: those of a tenant in a pool, and those of them that are locked."""

    def advance(self, num_units: int) -> bool:
        """Visit what changed since the last call, and `num_units` other sessions, rows or edges;
        large ones count more. Then compare, and drop the records in slices too. Return whether it
        is complete.

        It completes as long as no more than `MAX_CHANGED` change between two calls.
        """
        if self._cache.inspect().stores is not self._stores:
            # `rebuild` has replaced the stores: violations of the old ones no longer matter.
            self.violations.clear()
            return True
        if self._is_compared:
            return self._drop_records(_FREED_PER_UNIT * num_units)
        pending = self._pending
        self.has_seen_changes |= pending.num_changed > 0
        num_new = max(0, pending.num_changed - pending.num_left)
        left = num_units + min(num_new, MAX_CHANGED + 2 * self._cache.num_turns)
        while left > 0:
            if (cost := self._visit_next()) == 0:
                self.violations += map(Violation, self._compare())
                self._is_compared = True
                return self._drop_records(_FREED_PER_UNIT * num_units)
            left -= cost
        pending.num_left = pending.num_changed
        return False

    def _drop_records(self, num_records: int) -> bool:
        """Free up to `num_records` of each kind, and return whether none is left."""
        for records in (self._leases, self._nodes):
            for _ in range(min(num_records, len(records))):
                records.popitem()
        return not self._leases and not self._nodes

    def stop(self) -> None:
        """Stop recording changes. Call it once, when the recount is complete or abandoned."""
        self._stores.changes.unwatch(self._pending.changed)

    def _visit_next(self) -> int:
        """Visit one session, row or node; return its cost in units, 0 if nothing is left."""
        pending = self._pending
        if pending.sessions:
            return self._visit_session(pending.sessions.pop())
        if pending.changed.sessions:
            return self._visit_session(pending.changed.sessions.popitem()[0])
        if pending.num_rows:
            pending.num_rows -= 1
            return self._visit_row(RowId(pending.num_rows))
        if pending.nodes:
            parent, key, node = pending.nodes.pop()
            if node not in pending.changed.nodes and (node.parent is not parent or node.key != key):
                self._report("a child hangs under a key that is not its first page")
            return 1 if node in self._nodes else self._visit_node(node)
        if pending.changed.nodes:
            return self._visit_node(pending.changed.nodes.popitem()[0])
        return 0

    def _cost(self, num_pages: int, *, is_first: bool) -> int:
        """Return the units of a visit to `num_pages`, and begin to count edges for the next."""
        num_walked, self._num_walked = self._num_walked, 0
        return 1 + num_pages // _PAGES_PER_UNIT + num_walked * is_first // _EDGES_PER_UNIT

    def _report(self, text: str) -> None:
        self.violations.append(Violation(text))

    # Sessions

    def _visit_session(self, session_id: SessionId) -> int:
        self._pending.changed.sessions.pop(session_id, None)
        was = self._leases.pop(session_id, None)
        if was is not None:
            self._add_lease(was, -1)
        slot = self._cache.inspect().slots.get(session_id)
        if slot is None:
            return self._visit_transit(session_id, is_first=was is None)
        self.violations += slot_violations(slot, self._stores, whole=was is None)
        if slot.lease is None:
            return 1
        self._check_sole_tokens(slot.lease.receipt, f"row {slot.lease.row}")
        record = self._read_lease(
            slot.lease, Holder.ACTIVE if slot.is_active else Holder.SESSION_HELD
        )
        self._leases[session_id] = record
        self._add_lease(record, +1)
        self._num_walked += len(self._stores.tree.path(slot.lease.receipt)) if was is None else 0
        return self._cost(slot.lease.num_pages, is_first=was is None)

    def _visit_transit(self, name: SessionId, *, is_first: bool) -> int:
        transit = next((t for t in self._stores.transits.values() if t.name == name), None)
        if transit is None:
            return 1
        stores, page_size = self._stores, self._stores.page_size
        self._check_sole_tokens(transit.receipt, name)
        private = {
            pool: each.pages.astype(np.intp) if transit.is_incoming else np.empty(0, np.intp)
            for pool, each in transit.pages.items()
        }
        spans = {p: [transit.locked_span(c, page_size)] for p, c in stores.bounded.items()}
        locks = {p: self._page_locks(transit.receipt, p, span, name) for p, span in spans.items()}
        record = _LeaseRecord(None, Holder.SPILL, transit.receipt._node, private, locks)
        self._leases[name] = record
        self._add_lease(record, +1)
        return self._cost(transit.end // page_size, is_first=is_first)

    def _read_lease(self, lease: KVLease, holder: Holder) -> _LeaseRecord:
        stores, who = self._stores, f"row {lease.row}"
        return _LeaseRecord(
            row=lease.row,
            holder=holder,
            end=lease.receipt._node,
            private={p: np.array(lease.private_pages(p), np.intp) for p in stores.ledgers},
            locks={
                pool: self._page_locks(lease.receipt, pool, lease.locked_spans(component), who)
                for pool, component in stores.bounded.items()
            },
        )

    def _check_sole_tokens(self, receipt: LockReceipt, who: str) -> None:
        """Check `sole_tokens`, which plans use to know what cooling frees, against the locks."""
        num_tokens, node = 0, receipt._node
        while node.parent is not None and node.lock_ref == 1:
            num_tokens += len(node.tokens)
            node = node.parent
            self._num_walked += 1
        if num_tokens != receipt.sole_tokens:
            self._report(f"{who} alone has locked {num_tokens} tokens, not {receipt.sole_tokens}")

    def _page_locks(
        self, receipt: LockReceipt, pool: PoolName, spans: Iterable[tuple[int, int]], who: str
    ) -> _Locks:
        """Return the locks of a receipt in a bounded pool, and check that the pages are locked."""
        num_locks = positions = num_sole = 0
        page_size = self._stores.page_size
        for start, end in spans:
            if start >= end:
                continue
            num_locks += end - start
            positions += (end * (end - 1) - start * (start - 1)) // 2
            at = receipt.length // page_size
            for node in reversed(self._stores.tree.path(receipt, start * page_size)):
                at -= len(node.page_locks[pool])
                locks = node.page_locks[pool].view(max(0, start - at), max(0, end - at))
                num_sole += int(np.count_nonzero(locks == 1))
                if not (locks % TOMBSTONE_COUNT).all():
                    self._report(f"{pool}: {who} reads a page that is not locked")
        if num_sole != (known := receipt.sole_pages[pool]):
            self._report(f"{pool}: {who} alone has locked {num_sole} pages, not {known}")
        return _Locks(num_locks, positions)

    def _add_lease(self, record: _LeaseRecord, sign: int) -> None:
        self._add_locks(record.end, -sign)
        for pool, sums in self._sums.items():
            sums.add_private(record.private[pool], sign, record.holder)
            if pool in record.locks:
                sums.add_locks(record.locks[pool], -sign)

    # Rows

    def _visit_row(self, row: RowId) -> int:
        rows = self._stores.rows
        if rows.is_held(row):
            return 1
        end = rows.row_pages if row == NULL_ROW else rows.written_end(row)
        for pool in self._stores.ledgers:
            if rows.entries(pool, row)[:end].any():
                self._report(f"{pool}: the padding row or a free row names a page")
        return 1 + end // _PAGES_PER_UNIT

    # Edges

    def _visit_node(self, node: RadixNode) -> int:
        self._pending.changed.nodes.pop(node, None)
        was = self._nodes.pop(node, None)
        if was is not None:
            self._add_node(node, was, -1)
        if node.parent is None and not self._stores.tree.is_root(node):
            return 1  # it was removed
        for text in self._shape(node):
            self._report(text)
        record = self._read_node(node)
        self._nodes[node] = record
        self._add_node(node, record, +1)
        if was is None:
            self._pending.nodes += ((node, key, child) for key, child in node.children.items())
        return self._cost(len(node.tokens) // self._stores.page_size, is_first=was is None)

    def _shape(self, node: RadixNode) -> Iterator[str]:
        """Check that an edge has whole pages, is keyed by its first page and linked both ways."""
        page_size = self._stores.page_size
        if node.parent is None:
            if not node.children and not node.lock_ref:
                yield "an idle root was kept"
            return
        num_pages = len(node.tokens) // page_size
        if not num_pages or len(node.tokens) % page_size:
            yield f"an edge of {len(node.tokens)} tokens"
        if any(len(node.pages[pool]) != num_pages for pool in self._stores.ledgers):
            yield f"an edge of {len(node.tokens)} tokens has another number of pages"
        if node.key != node.tokens.view(0, page_size).tobytes():
            yield "a child hangs under a key that is not its first page"
        if node.parent.children.get(node.key) is not node:
            yield "a child hangs under a key that is not its first page, or is not in the tree"

    def _read_node(self, node: RadixNode) -> _NodeRecord:
        pages, num_protected, locks = {}, {}, {}
        for pool in node.pages:
            ids = node.pages[pool].view()
            if pool not in node.page_locks:
                pages[pool] = ids.astype(np.intp)
                num_protected[pool] = len(ids) if node.lock_ref > 0 else 0
                continue
            counts = node.page_locks[pool].view()
            is_there = ids != NULL_PAGE
            if ((counts >= TOMBSTONE_COUNT) == is_there).any() or (counts < 0).any():
                self._report(f"{pool}: pages of a node count {counts} locks")
            pages[pool] = ids[is_there].astype(np.intp)
            num_protected[pool] = int(np.count_nonzero(counts[is_there]))
            locks[pool] = _locks_of(counts % TOMBSTONE_COUNT, self._first_page(node))
        return _NodeRecord(node.parent, node.lock_ref, pages, num_protected, locks)

    def _first_page(self, node: RadixNode) -> int:
        """Return the index of an edge's first page on its path."""
        num_tokens, above = 0, node.parent
        while above is not None:
            num_tokens += len(above.tokens)
            above = above.parent
            self._num_walked += 1
        return num_tokens // self._stores.page_size

    def _add_node(self, node: RadixNode, record: _NodeRecord, sign: int) -> None:
        self._add_locks(node, sign * record.lock_ref)
        if record.parent is not None:
            self._add_locks(record.parent, -sign * record.lock_ref)
        for pool, pages in record.pages.items():
            self._sums[pool].add_node(pages, record.num_protected[pool], sign)
            self._of_tenants[node.tenant, pool, False] += sign * len(pages)
            self._of_tenants[node.tenant, pool, True] += sign * record.num_protected[pool]
            if pool in record.locks:
                self._sums[pool].add_locks(record.locks[pool], sign)

    # Sums

    def _add_locks(self, node: RadixNode, num_locks: int) -> None:
        diff = self._lock_diffs.pop(node, 0) + num_locks
        if diff:
            self._lock_diffs[node] = diff

    def _compare(self) -> Iterator[str]:
        """Compare the sums. Call it when nothing is left to visit."""
        for node, diff in self._lock_diffs.items():
            if node not in self._nodes:
                yield "a lock is held on a node that is not in the tree"
            else:
                held = f"{node.lock_ref} locks, {node.lock_ref - diff} are held"
                yield f"a node of {len(node.tokens)} tokens counts {held}"
        yield from self._compare_rows()
        yield from self._compare_tenants()
        for pool, ledger in self._stores.ledgers.items():
            yield from self._compare_pool(ledger, self._sums[pool])

    def _compare_rows(self) -> Iterator[str]:
        rows = self._stores.rows
        of_rows = [record.row for record in self._leases.values() if record.row is not None]
        leased = sorted(map(int, of_rows))
        if leased != rows.held_rows():
            yield f"rows {rows.held_rows()} are held, leases have {leased}"
        if sorted(rows.free_rows() + leased) != list(range(1, rows.num_rows + 1)):
            yield "rows: free and held ones are not all, once each, without row 0"

    def _compare_tenants(self) -> Iterator[str]:
        tenants = self._stores.tree.tenants
        known = {
            (tenant, pool, is_locked): counts[pool]
            for tenant, account in tenants.items()
            for is_locked, counts in ((False, account.held), (True, account.protected))
            for pool in self._stores.ledgers
        }
        for (tenant, pool, is_locked), num_pages in (self._of_tenants | known).items():
            counted = self._of_tenants[tenant, pool, is_locked]
            if counted != known.get((tenant, pool, is_locked), 0):
                what = "locked pages" if is_locked else "pages"
                yield f"{pool}: a tenant has {counted} {what} in the tree, its account {num_pages}"
        for pool in self._stores.ledgers:
            for name, total in (("guarded", tenants.guarded), ("unheld", tenants.unheld)):
                counted = sum(getattr(account, name)[pool] for _, account in tenants.items())
                if counted != total[pool]:
                    yield f"{pool}: {counted} pages are {name}, {total[pool]} are counted"

    def _compare_pool(self, ledger: Ledger, sums: _PoolSums) -> Iterator[str]:
        pool = ledger.pool
        quarantined = self._stores.quarantined[pool]
        fenced = [page for pages in self._stores.fenced.values() for page in pages[pool]]
        num_free, is_free = self._stores.allocators[pool].count_free_pages()
        recount = Accounts(
            pool=pool,
            pages=ledger.num_pages,
            free=num_free,
            reserved=1,
            tree_evictable=sums.evictable,
            tree_protected=sums.protected,
            active=sums.private[Holder.ACTIVE],
            session_held=sums.private[Holder.SESSION_HELD],
            fenced=len(fenced),
            spill=sums.private[Holder.SPILL],
            quarantine=len(quarantined),
        )
        if recount != ledger.snapshot():
            yield f"{pool}: recounted {recount}, the ledger says {ledger.snapshot()}"
        if (sums.num_locks, sums.positions) != (0, 0):
            yield f"{pool}: pages of nodes count {sums.num_locks} locks too many"
        if sums.num_holders[-1]:
            yield f"{pool}: a page id lies outside the pool"
        num_holders = sums.num_holders[:-1] + is_free
        np.add.at(num_holders, [NULL_PAGE, *quarantined, *fenced], 1)
        if (num_holders != 1).any():
            twice, lost = np.flatnonzero(num_holders > 1), np.flatnonzero(num_holders < 1)
            yield f"{pool}: pages with two holders {twice}, with none {lost}"


def _locks_of(counts: Pages, first_page: int) -> _Locks:
    """Return the locks of consecutive pages of a path from their counts, int32 [n]."""
    num_locks = int(counts.sum(dtype=np.int64))
    positions = int(np.dot(counts.astype(np.int64), np.arange(len(counts))))
    return _Locks(num_locks, positions + first_page * num_locks)
