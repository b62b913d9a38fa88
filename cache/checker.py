"""The memory checker: recount every page from the structures that hold it, and compare.

Nothing here trusts the ledger, a cached count or a flag. A violation is always a bug of ours; it
names the session whose pages are in doubt where one can be named, so that service can quarantine
that session and go on, while tests raise.

level 0   every step        O(pools)       accounts sum to the pool
level 1   end of a turn     O(that slot)   the pair check: lock path + private pages = row
level 2   idle, on demand   O(pages)       all slots, all pages, all locks, all rows
level 3   sampled           one page       the content itself, read by the device: `cache.content`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from cache.components import Component
from cache.errors import AuditFailed
from cache.lease import KVLease
from cache.ledger import Accounts
from cache.page_locks import no_locks
from cache.radix_node import RadixNode
from cache.session_cache import SessionAwareCache
from cache.session_slot import SessionSlot
from cache.stores import KVStores
from cache.types import (
    NULL_PAGE,
    NULL_ROW,
    Holder,
    Pages,
    PoolName,
    RowId,
    SessionId,
    SlotState,
    pages_for,
)

MAX_SETTLED_STATES: Final = 3
"""At a turn's mark, at its computed length, and at the last whole page before that."""

_LEASED_AND_LENT: Final[Mapping[SlotState, tuple[bool, bool]]] = MappingProxyType(
    {
        SlotState.COLD: (False, False),
        SlotState.PARKED: (True, False),
        SlotState.LENT: (True, True),
        SlotState.CLOSING: (True, True),
    }
)


@dataclass(frozen=True, slots=True)
class Violation:
    """One disagreement. `session_id` is None when no single session is to blame."""

    text: str
    session_id: SessionId | None = None


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
        name = slot.session_id
        found += [Violation(f"{name}: {text}", name) for text in _slot(slot, stores)]
    if level == 1:
        return found
    texts = [*_locks(slots, stores), *_page_locks(slots, stores)]
    texts += [*_shape(stores), *_rows(slots, stores)]
    for pool in stores.ledgers:
        texts += _pages(pool, slots, stores)
    return found + [Violation(text) for text in texts]


def _slot(slot: SessionSlot, stores: KVStores) -> Iterator[str]:
    """Level 1: one slot, from its own structures."""
    lease = slot.lease
    if _LEASED_AND_LENT[slot.state] != (lease is not None, slot.is_active):
        yield f"{slot.state.name} with lease {lease is not None} and borrower {slot.borrower}"
    if lease is None:
        return
    if lease.holder is not (Holder.ACTIVE if slot.is_active else Holder.SESSION_HELD):
        yield f"private pages are {lease.holder.name} while {slot.state.name}"
    if lease.receipt.namespace != slot.namespace:
        yield "the lock is in another namespace"
    yield from _lengths(slot, lease, stores.page_size)
    path = stores.tree.path(lease.receipt)
    yield from _content(slot, lease, path)
    for component in stores.components:
        row = stores.rows.entries(component.pool, lease.row)
        # The pair check: what the lease says it holds is what attention will read, and behind it
        # are null pages, which are zeros.
        held = b"".join(pages.tobytes() for pages in _page_arrays(path, component.pool))
        if component.forgets:
            held = _held_part(held, row, lease, component)
        held += np.array(lease.private_entries(component.pool), np.int32).tobytes()
        if row.tobytes() != held.ljust(row.nbytes, b"\0"):
            entries = row[: np.flatnonzero(row)[-1] + 1] if row.any() else row[:0]
            pages = np.frombuffer(held, np.int32)
            yield f"{component.pool}: row {lease.row} is {entries}, the lease holds {pages}"
        if component is stores.recurrent:
            yield from _states(slot, lease, component)
        else:
            yield from _closed_form(slot, lease, component, stores)
    if stores.forgetful and lease.rewound_len(slot.kv_committed_len) != slot.kv_committed_len:
        yield "what the next forward reads was let go"


def _held_part(pages: bytes, row: Pages, lease: KVLease, component: Component) -> bytes:
    """The pages of a lock path that the lease has locked, null pages in the place of others.

    One that is locked and not read may be missing in the row: somebody else has published it since.
    """
    entries = np.frombuffer(pages, np.int32).copy()
    for page in range(len(entries)):
        is_gone = row[page] == NULL_PAGE and not lease.needs(component, page)
        if is_gone or not lease.holds(component, page):
            entries[page] = NULL_PAGE
    return entries.tobytes()


def _lengths(slot: SessionSlot, lease: KVLease, page_size: int) -> Iterator[str]:
    lengths = (slot.cache_protected_len, slot.kv_committed_len, slot.kv_allocated_len)
    if not 0 <= lengths[0] <= lengths[1] <= lengths[2]:
        yield f"protected, committed, allocated are {lengths}"
    if lengths[1] > len(slot.tokens):
        yield f"committed {lengths[1]} is ahead of a history of {len(slot.tokens)}"
    if lengths[0] % page_size or lengths[2] % page_size:
        yield f"protected, committed, allocated {lengths} are not whole pages of {page_size}"
    if slot.state is SlotState.PARKED and lengths[1] - lengths[0] >= page_size:
        yield f"a whole page was not published: {lengths}"
    if slot.state is SlotState.PARKED and lengths[2] - lengths[1] >= page_size:
        yield f"a whole page past the content was kept: {lengths}"
    if lease.num_pages * page_size != lengths[2]:
        yield f"allocated {lengths[2]} is not {lease.num_pages} pages"


def _content(slot: SessionSlot, lease: KVLease, path: list[RadixNode]) -> Iterator[str]:
    locked_len = sum(len(node.tokens) for node in path)
    if locked_len != lease.protected_len:
        yield f"the lock path has {locked_len} tokens, the receipt says {lease.protected_len}"
    locked = b"".join(node.tokens.view().tobytes() for node in path)
    if locked != slot.tokens.view(0, locked_len).tobytes():
        yield "the locked path holds other tokens than the history"


def _closed_form(
    slot: SessionSlot, lease: KVLease, component: Component, stores: KVStores
) -> Iterator[str]:
    """The formula of the original work: private = ceil(allocated / P) - protected / P; only a pool
    that forgets has let go of some."""
    pool, page_size = component.pool, stores.page_size
    private = pages_for(slot.kv_allocated_len, page_size) - slot.cache_protected_len // page_size
    entries = lease.private_entries(pool)
    if len(entries) != private or (NULL_PAGE in entries and not component.forgets):
        yield f"{pool}: private are {entries}, the closed form says {private} pages"


def _states(slot: SessionSlot, lease: KVLease, component: Component) -> Iterator[str]:
    """A parked session keeps its last state, if no snapshot is one; a running turn few more."""
    lengths, committed_len = lease.states.lengths, slot.kv_committed_len
    is_published = committed_len == slot.cache_protected_len
    if slot.state is SlotState.PARKED and lengths != ([] if is_published else [committed_len]):
        yield f"{component.pool}: states after {lengths} tokens are kept, after {committed_len} one"
    num_settled = sum(length <= committed_len for length in lengths)
    if num_settled > MAX_SETTLED_STATES or any(n > slot.kv_allocated_len for n in lengths):
        yield f"{component.pool}: a running turn keeps states after {lengths} tokens"


def _page_locks(slots: Iterable[SessionSlot], stores: KVStores) -> Iterator[str]:
    """In pools that forget, lock counts of pages are the number of leases that hold them."""
    for component in stores.forgetful.values():
        expected: Counter[tuple[int, int]] = Counter()
        for slot in slots:
            if slot.lease is None:
                continue
            at = 0
            for node in stores.tree.path(slot.lease.receipt):
                for index in range(len(node.pages[component.pool])):
                    expected[id(node), index] += slot.lease.holds(component, at + index)
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


def _page_arrays(nodes: Iterable[RadixNode], pool: PoolName) -> list[Pages]:
    return [node.pages[pool].view() for node in nodes]
