"""Level 1 of the memory check: check what one session holds against its own structures.

The pair check: the row, which attention reads, must name exactly the pages of the lease's lock path
and its private pages. It reads the part of the row that changed since the session's turn began, so
its cost grows with the turn and not with the history. A recount reads the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.components import Component
from cache.lease import KVLease
from cache.radix_node import RadixNode
from cache.session_slot import SessionSlot
from cache.stores import KVStores
from cache.types import NULL_PAGE, Holder, SessionId, SlotState, pages_for

MAX_SETTLED_STATES: Final = 3
"""States at a turn's mark, at its computed length, and at the last whole page before that."""

_SHORT: Final = 4096
"""Up to so many entries a copy costs less than a numpy comparison."""

_LEASED_AND_LENT: Final[Mapping[SlotState, tuple[bool, bool]]] = {
    SlotState.COLD: (False, False),
    SlotState.PARKED: (True, False),
    SlotState.LENT: (True, True),
    SlotState.CLOSING: (True, True),
}


@dataclass(frozen=True, slots=True)
class Violation:
    """Describe one violation. `session_id` is None when it names no single session."""

    text: str
    session_id: SessionId | None = None


def slot_violations(slot: SessionSlot, stores: KVStores, *, whole: bool) -> list[Violation]:
    """Return the violations of one session. `whole`: read its whole row and path, not only what
    changed since its turn began."""
    name = slot.session_id
    return [Violation(f"{name}: {text}", name) for text in _check(slot, stores, whole=whole)]


def _check(slot: SessionSlot, stores: KVStores, *, whole: bool) -> Iterator[str]:
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
    part = _part(lease, stores, whole=whole)
    yield from _content(slot, part.path, part.start * stores.page_size)
    for component in stores.components:
        yield from _pair(lease, component, stores, part)
        if component is stores.recurrent:
            yield from _states(slot, lease, component)
        else:
            yield from _closed_form(slot, lease, component, stores)
    if stores.bounded and lease.rewound_len(slot.kv_committed_len) != slot.kv_committed_len:
        yield "a page that the next forward reads is not kept"


class _Part(NamedTuple):
    """Hold the range [start, end) of row entries to compare, and the edges of the lock path that
    reach beyond `start`."""

    start: int
    end: int
    path: list[RadixNode]


def _part(lease: KVLease, stores: KVStores, *, whole: bool) -> _Part:
    """Return the changed and the private entries; if `whole`, all that were ever written."""
    if whole:
        start, end = 0, max(lease.num_pages, stores.rows.written_end(lease.row))
    else:
        start, end = stores.rows.changed(lease.row)
        # In bounded pools the row may name pages of the window before the changed entries.
        start = max(0, min(start, lease.protected_len // stores.page_size, lease.first_entry))
        end = max(end, lease.num_pages)
    return _Part(start, end, stores.tree.path(lease.receipt, start * stores.page_size))


def _lengths(slot: SessionSlot, lease: KVLease, page_size: int) -> Iterator[str]:
    lengths = (slot.cache_protected_len, slot.kv_committed_len, slot.kv_allocated_len)
    if not 0 <= lengths[0] <= lengths[1] <= lengths[2]:
        yield f"protected, committed, allocated are {lengths}"
    if lengths[1] > len(slot.tokens):
        yield f"committed {lengths[1]} is ahead of a history of {len(slot.tokens)}"
    if lengths[0] % page_size or lengths[2] % page_size:
        yield f"protected, committed, allocated {lengths} are not whole pages of {page_size}"
    if slot.tail is not None and not lengths[0] <= slot.tail.start <= len(slot.tokens):
        yield f"a tail begins at {slot.tail.start}, {lengths} of {len(slot.tokens)} tokens"
    is_at_rest = slot.state is SlotState.PARKED and slot.tail is None
    if is_at_rest and lengths[1] - lengths[0] >= page_size:
        yield f"a whole page was not published: {lengths}"
    if is_at_rest and lengths[2] - lengths[1] >= page_size:
        yield f"a whole page past the content was kept: {lengths}"
    if lease.num_pages * page_size != lengths[2]:
        yield f"allocated {lengths[2]} is not {lease.num_pages} pages"


def _content(slot: SessionSlot, path: Sequence[RadixNode], start: int) -> Iterator[str]:
    """Check that the lock path holds the tokens of the history, from position `start` on."""
    at = slot.cache_protected_len - sum(len(node.tokens) for node in path)
    if at > start or at < 0:
        yield f"the lock path begins at {at}, the receipt says {slot.cache_protected_len} tokens"
        return
    for node in path:
        skipped = max(0, start - at)
        history = slot.tokens.view(at + skipped, at + len(node.tokens))
        if not _is_equal(node.tokens.view(skipped), history):
            yield "the locked path holds other tokens than the history"
        at += len(node.tokens)


def _pair(lease: KVLease, component: Component, stores: KVStores, part: _Part) -> Iterator[str]:
    """Check that the row names the pages of the path, then the private ones, then null pages."""
    pool = component.pool
    row = stores.rows.entries(pool, lease.row)[part.start : part.end]
    locked = [node.pages[pool].view() for node in part.path]
    num_before = lease.protected_len // stores.page_size - sum(map(len, locked))
    protected = np.concatenate([np.empty(0, np.int32), *locked])[max(0, part.start - num_before) :]
    if component.is_bounded:
        is_held = _is_held(lease, component, part.start, len(protected))
        num_unread = min(max(0, lease.first_needed(component) - part.start), len(protected))
        # A locked page that is not read may be missing in the row: it was a tombstone when the row
        # was written, and another session has filled it since.
        is_held[:num_unread] &= row[:num_unread] != NULL_PAGE
        protected = np.where(is_held, protected, np.int32(NULL_PAGE))
    held = np.concatenate([protected, np.array(lease.private_entries(pool), np.int32)])
    if not _is_equal(row[: len(held)], held) or row[len(held) :].any():
        entries = row[: np.flatnonzero(row)[-1] + 1] if row.any() else row[:0]
        yield f"{pool}: row {lease.row} is {entries} at {part.start}, the lease holds {held}"


def _is_equal(left: NDArray[np.int32], right: NDArray[np.int32]) -> bool:
    """Return whether two arrays are equal; for short ones several times faster than numpy."""
    if len(left) < _SHORT:
        return left.tobytes() == right.tobytes()
    return np.array_equal(left, right)


def _is_held(lease: KVLease, component: Component, start: int, num_pages: int) -> NDArray[np.bool_]:
    """Return which of the pages [start, start + num_pages) of its path the lease has locked."""
    is_held = np.zeros(num_pages, np.bool_)
    for first, end in lease.locked_spans(component):
        is_held[max(0, first - start) : max(0, end - start)] = True
    return is_held


def _closed_form(
    slot: SessionSlot, lease: KVLease, component: Component, stores: KVStores
) -> Iterator[str]:
    """Check the closed form: private pages = ceil(allocated / P) - protected / P. Only a bounded
    pool may have freed some of them."""
    pool, page_size = component.pool, stores.page_size
    private = pages_for(slot.kv_allocated_len, page_size) - slot.cache_protected_len // page_size
    entries = lease.private_entries(pool)
    if len(entries) != private or (NULL_PAGE in entries and not component.is_bounded):
        yield f"{pool}: private are {entries}, the closed form says {private} pages"


def _states(slot: SessionSlot, lease: KVLease, component: Component) -> Iterator[str]:
    """Check that a session at rest keeps its last state, unless that is a snapshot, and that a
    running turn, or a tail, keeps few more."""
    lengths, committed_len = lease.states.lengths, slot.kv_committed_len
    is_published = committed_len == slot.cache_protected_len
    is_at_rest = slot.state is SlotState.PARKED and slot.tail is None
    if is_at_rest and lengths != ([] if is_published else [committed_len]):
        yield f"{component.pool}: states after {lengths} tokens are kept, after {committed_len} one"
    num_settled = sum(length <= committed_len for length in lengths)
    if num_settled > MAX_SETTLED_STATES or any(n > slot.kv_allocated_len for n in lengths):
        yield f"{component.pool}: a running turn keeps states after {lengths} tokens"
