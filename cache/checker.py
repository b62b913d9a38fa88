"""The memory checker: recount every page from the structures that hold it, and compare.

Nothing here trusts the ledger, a cached count or a flag. A violation is always a bug of ours; it
names the session whose pages are in doubt where one can be named, so that service can quarantine
that session and go on, while tests raise.

level 0   every step        O(pools)       accounts sum to the pool
level 1   end of a turn     O(that turn)   the pair check: lock path + private pages = row
level 2   idle, on demand   O(pages)       all slots, all pages, all locks, all rows
level 3   sampled           one page       the content itself, read by the device: `cache.content`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from cache.errors import AuditFailed
from cache.ledger import Accounts
from cache.page_locks import no_locks
from cache.pair_check import Violation, slot_violations
from cache.radix_node import RadixNode
from cache.session_cache import SessionAwareCache
from cache.session_slot import SessionSlot
from cache.stores import KVStores
from cache.types import NULL_PAGE, NULL_ROW, Pages, PoolName, RowId, SessionId

__all__ = ["Violation", "audit", "find_violations"]


def audit(cache: SessionAwareCache, level: int = 2, session_id: SessionId | None = None) -> None:
    """Raise on any violation; the form for tests and strict mode.

    Raises:
        AuditFailed: with every violation found.
    """
    violations = find_violations(cache, level, session_id)
    if violations:
        raise AuditFailed("; ".join(violation.text for violation in violations))


def find_violations(
    cache: SessionAwareCache, level: int = 2, session_id: SessionId | None = None
) -> list[Violation]:
    """Check at a level; with `session_id`, level 1 looks at that slot only (if it still exists).

    Changes nothing.
    """
    stores = cache.stores
    found = [
        Violation(f"{ledger.pool}: the accounts do not sum to the pool: {ledger.snapshot()}")
        for ledger in stores.ledgers.values()
        if not ledger.is_balanced()
    ]
    if level == 0:
        return found
    slots = list(cache.inspect_slots(session_id if level == 1 else None))
    for slot in slots:
        found += slot_violations(slot, stores, whole=level > 1)
    if level == 1:
        return found
    texts = [*_locks(slots, stores), *_page_locks(slots, stores)]
    texts += [*_shape(stores), *_rows(slots, stores)]
    for pool in stores.ledgers:
        texts += _pages(pool, slots, stores)
    return found + [Violation(text) for text in texts]


def _page_locks(slots: Iterable[SessionSlot], stores: KVStores) -> Iterator[str]:
    """In pools that forget, lock counts of pages are the number of leases that hold them."""
    for component in stores.forgetful.values():
        expected: Counter[tuple[int, int]] = Counter()
        for slot in slots:
            if slot.lease is None:
                continue
            at, spans = 0, slot.lease.locked_spans(component)
            for node in stores.tree.path(slot.lease.receipt):
                for index in range(len(node.pages[component.pool])):
                    is_held = any(start <= at + index < end for start, end in spans)
                    expected[id(node), index] += is_held
                at += len(node.pages[component.pool])
        for _, root in stores.tree.roots():
            for node in root.below():
                locks = node.page_locks[component.pool].view().tolist()
                held = [expected[id(node), index] for index in range(len(locks))]
                if locks != (no_locks(node.pages[component.pool].view()) + held).tolist():
                    yield f"{component.pool}: pages of a node count {locks} locks"


def _locks(slots: Iterable[SessionSlot], stores: KVStores) -> Iterator[str]:
    """Lock counts are the number of receipts whose path has the node."""
    expected: Counter[int] = Counter()
    roots: Counter[object] = Counter()
    for slot in slots:
        if slot.lease is not None:
            expected.update(id(node) for node in stores.tree.path(slot.lease.receipt))
            roots[slot.lease.receipt.namespace] += 1
    for namespace, root in stores.tree.roots():
        if root.lock_count != roots.pop(namespace, 0):
            yield f"the root of {namespace} counts {root.lock_count} locks"
        for node in root.below():
            if node.lock_count != expected.pop(id(node), 0):
                yield f"a node of {len(node.tokens)} tokens counts {node.lock_count} locks"
    if expected or roots:
        yield "a lock is held on a node that is not in the tree"


def _shape(stores: KVStores) -> Iterator[str]:
    """Edges are whole pages, found under their first page, and hang together both ways."""
    for namespace, root in stores.tree.roots():
        if not root.children and not root.lock_count:
            yield f"an idle root of {namespace} was kept"
        for node in (root, *root.below()):
            for key, child in node.children.items():
                num_pages = len(child.tokens) // stores.page_size
                if key != child.key or key != child.tokens.view(0, stores.page_size).tobytes():
                    yield "a child hangs under a key that is not its first page"
                if child.parent is not node:
                    yield "a child has another parent"
                if not num_pages or len(child.tokens) % stores.page_size:
                    yield f"an edge of {len(child.tokens)} tokens"
                if any(len(child.pages[pool]) != num_pages for pool in stores.ledgers):
                    yield f"an edge of {len(child.tokens)} tokens has another number of pages"
                if child.lock_count > node.lock_count:
                    yield "a node has more locks than its parent"


def _rows(slots: Iterable[SessionSlot], stores: KVStores) -> Iterator[str]:
    rows = stores.rows
    leased = sorted(int(slot.lease.row) for slot in slots if slot.lease is not None)
    if leased != rows.held_rows():
        yield f"rows {rows.held_rows()} are held, leases have {leased}"
    if sorted(rows.listed_free_rows() + leased) != list(range(1, rows.num_rows + 1)):
        yield "rows: free and held ones are not all, once each, without row 0"
    empty = [NULL_ROW, *map(RowId, rows.listed_free_rows())]
    for pool in stores.ledgers:
        if any(rows.entries(pool, row).any() for row in empty):
            yield f"{pool}: the padding row or a free row names a page"


def _pages(pool: PoolName, slots: Iterable[SessionSlot], stores: KVStores) -> Iterator[str]:
    """Every page once, in the structure that the ledger says."""
    ledger = stores.ledgers[pool]
    nodes = [node for _, root in stores.tree.roots() for node in root.below()]
    private: dict[bool, list[int]] = {True: [], False: []}
    for slot in slots:
        if slot.lease is not None:
            private[slot.is_active] += slot.lease.private_pages(pool)
    free = stores.allocators[pool].free_pages()
    evictable = [pages for node in nodes if len(pages := _tree_pages(node, pool, is_locked=False))]
    protected = [pages for node in nodes if len(pages := _tree_pages(node, pool, is_locked=True))]
    recount = Accounts(
        pool=pool,
        pages=ledger.num_pages,
        free=len(free),
        reserved=1,
        tree_evictable=sum(map(len, evictable)),
        tree_protected=sum(map(len, protected)),
        active=len(private[True]),
        session_held=len(private[False]),
        fenced=0,
        spill=0,
        quarantine=len(stores.quarantined[pool]),
    )
    if recount != ledger.snapshot():
        yield f"{pool}: recounted {recount}, the ledger says {ledger.snapshot()}"
    listed = [NULL_PAGE, *private[True], *private[False], *stores.quarantined[pool]]
    everywhere = np.concatenate([free, *evictable, *protected, np.array(listed, np.int32)])
    if everywhere.min() < 0 or everywhere.max() >= ledger.num_pages:
        yield f"{pool}: a page id lies outside the pool"
        return
    num_holders = np.bincount(everywhere, minlength=ledger.num_pages)
    if (num_holders != 1).any():
        twice, lost = np.flatnonzero(num_holders > 1), np.flatnonzero(num_holders == 0)
        yield f"{pool}: pages with two holders {twice}, with none {lost}"


def _tree_pages(node: RadixNode, pool: PoolName, *, is_locked: bool) -> Pages:
    """Pages of an edge that are there and locked, or not."""
    pages: Pages = node.pages[pool].view()
    if pool in node.page_locks:
        locks = node.page_locks[pool].view()
        picked: Pages = pages[(locks > 0) & (pages != NULL_PAGE) if is_locked else locks == 0]
        return picked
    return pages if (node.lock_count > 0) == is_locked else pages[:0]
