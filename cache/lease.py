"""`KVLease`: hold one session's row, lock, private pages and lengths; no other code moves them.

In a sliding-window pool a lease holds the pages inside the window at `computed_len`. While a turn
runs it also keeps the window at the turn's start (the mark), so that the turn can be rolled back.
Every other entry of the row is `NULL_PAGE`. In a recurrent pool the row names the snapshots that
the lease has locked; the states of its own are in `cache.lease_states`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cache.components import Component
from cache.counted_length import CountedLength
from cache.errors import AuditFailed
from cache.lease_states import LeaseStates
from cache.radix_node import LockReceipt, PagesByPool
from cache.stores import KVStores
from cache.types import (
    NULL_PAGE,
    Holder,
    Namespace,
    PageId,
    PoolName,
    RowId,
    StateMoves,
    TableWrite,
    Tokens,
    pages_for,
)


class KVLease(CountedLength):
    """Hold the KV of one session. A slot owns the lease, at most one turn borrows it.

        0                   protected_len            computed_len   capacity_len     (tokens)
        |---------|---------|---------|---------|----+----|---------|     (| = page boundary)
        | tree pages, locked| private pages: KV valid| private: room|
        | Holder.TREE       | Holder.ACTIVE while lent, SESSION_HELD while parked (`holder`)
        | shared by content | named by no other row; whole ones go to the tree at `publish`

    The slot reports these lengths as `cache_protected_len`, `kv_committed_len` and
    `kv_allocated_len`. The first and the last are whole pages and are derived from the lock and
    the page lists, so they cannot disagree with them; `computed_len` may lie inside a page.
    """

    __slots__ = (
        "_base_len",
        "_first_entry",
        "_mark_len",
        "_private",
        "_rollback_pages",
        "_stores",
        "holder",
        "receipt",
        "row",
        "states",
    )

    def __init__(self, stores: KVStores, namespace: Namespace) -> None:
        """Take a row and a lock of length 0, without pages. The lease begins as lent.

        Raises:
            OutOfRows: nothing was taken.
        """
        super().__init__()
        self._stores = stores
        self.row: RowId = stores.rows.alloc()
        self.receipt: LockReceipt = stores.tree.lock_root(namespace)
        self.states = LeaseStates(stores)
        self._private: PagesByPool = {pool: [] for pool in stores.paged}
        # Per bounded pool: all entries of the row before this page are `NULL_PAGE`.
        self._first_entry = dict.fromkeys(stores.bounded, 0)
        self._base_len = 0  # what a rollback restores
        self._mark_len = 0  # where the turn starts to compute, `_base_len` or before it
        # The private page that the mark cuts, once the tree's copy has replaced it in the row. A
        # rollback needs it if another session has locked the tree's copy by then.
        self._rollback_pages: PagesByPool = {}
        self.holder = Holder.ACTIVE

    @property
    def protected_len(self) -> int:
        """Return the tokens in pages that the tree owns and this lease has locked."""
        return self.receipt.length

    @property
    def capacity_len(self) -> int:
        """Return the tokens that its pages have room for."""
        return self.num_pages * self._stores.page_size

    @property
    def num_pages(self) -> int:
        """Return the entries of the row in use, the same in every pool: locked and private."""
        num_protected = self.receipt.length // self._stores.page_size
        return num_protected + len(next(iter(self._private.values())))

    def private_pages(self, pool: PoolName) -> tuple[int, ...]:
        """Return the pages of one pool that no other session can see: those of the row in order of
        position, and those kept for a rollback."""
        if pool == self.states.pool:
            return self.states.pages
        return (*filter(None, self._private[pool]), *self._rollback_pages.get(pool, ()))

    def num_private(self, pool: PoolName) -> int:
        """Return how many `private_pages` there are."""
        if pool == self.states.pool:
            return len(self.states.pages)
        private = self._private[pool]
        return len(private) - private.count(NULL_PAGE) + len(self._rollback_pages.get(pool, ()))

    def freed_pages(self) -> Mapping[PoolName, int]:
        """Return, per paged pool, the pages that only this lease keeps from being free or
        evictable. States are not counted: every row comes with its own."""
        stores = self._stores
        published = stores.tree.sole_pages(self.receipt)
        return {pool: published[pool] + self.num_private(pool) for pool in stores.paged}

    def num_private_from(self, pool: PoolName, page: int) -> int:
        """Return how many of its private pages of a paged pool stand in the row from entry `page`
        on."""
        private = self._private[pool][max(0, page - self._protected_pages) :]
        return len(private) - private.count(NULL_PAGE)

    @property
    def base_len(self) -> int:
        """Return how many valid positions it had when it was marked."""
        return self._base_len

    def num_protected(self, pool: PoolName) -> int:
        """Return how many pages of one pool it has locked."""
        if pool not in self._stores.bounded:
            return self._protected_pages
        entries = self._stores.rows.entries(pool, self.row)
        return int(np.count_nonzero(entries[self._first_entry[pool] : self._protected_pages]))

    def private_entries(self, pool: PoolName) -> tuple[int, ...]:
        """Return the row's entries after the protected part: private pages, `NULL_PAGE` where one
        was freed. Empty in a recurrent pool."""
        return tuple(self._private.get(pool, ()))

    @property
    def private_lists(self) -> Iterable[Sequence[int]]:
        """Return, per paged pool, what `private_entries` copies."""
        return self._private.values()

    @property
    def first_entry(self) -> int:
        """Return the first entry that may name a page in any bounded pool."""
        return min(self._first_entry.values(), default=self._protected_pages)

    def locked_spans(self, component: Component) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the protected pages that the lease has locked, as two ranges [start, end): those
        that a forward at its mark reads, and those that one at the receipt's length reads."""
        first = component.first_page(self.receipt.length)
        last_span = (first, self._protected_pages)
        if (mark := self.receipt.mark) is None:
            return (0, 0), last_span
        return (component.first_page(mark), min(mark // self._stores.page_size, first)), last_span

    def first_needed(self, component: Component) -> int:
        """Return the first page that a forward at its length or its mark reads."""
        first = component.first_page(self.computed_len)
        if self.receipt.mark is None:
            return first
        return min(first, component.first_page(self._mark_len))

    def missing_pages(self, to_len: int, num_drafts: int = 0) -> dict[PoolName, int]:
        """Return the pages that `grow` would allocate, by pool; empty when there are enough."""
        num_pages = pages_for(to_len, self._stores.page_size) - self.num_pages
        missing = dict.fromkeys(self._private, num_pages) if num_pages > 0 else {}
        if self.states.pool is not None:
            num_states = self.states.num_missing(self.computed_len, to_len, num_drafts)
            missing[self.states.pool] = num_states
        return missing

    def state_moves(self, start: int, end: int, num_drafts: int = 0) -> StateMoves | None:
        """Return which states a forward over positions [start, end) reads and writes, the last
        `num_drafts` positions being drafts; None without a recurrent pool. Call `grow` before.
        """
        if self.states.pool is None:
            return None
        return StateMoves(self.state_at(start), self.states.targets(start, end, num_drafts))

    def kept_states(self, start: int, end: int) -> StateMoves | None:
        """Return the states before and after positions [start, end); the target is `NULL_PAGE` if
        that state was freed. None without a recurrent pool.
        """
        if self.states.pool is None:
            return None
        return StateMoves(self.state_at(start), ((end, self._state_page(end)),))

    def state_at(self, length: int) -> int:
        """Return the page with the state after `length` tokens, private or a snapshot of the tree;
        `NULL_PAGE` for 0.

        Raises:
            AuditFailed: no such state is kept.
        """
        page = self._state_page(length)
        if (page == NULL_PAGE) != (length == 0):
            raise AuditFailed(f"row {self.row}: the state after {length} tokens is not kept")
        return page

    def _state_page(self, length: int) -> int:
        page, stores = self.states.page_at(length), self._stores
        # Snapshots exist only at page boundaries: entry i is the state after page i.
        if page == NULL_PAGE and length and length % stores.page_size == 0:
            assert stores.recurrent is not None, "only a recurrent pool has states"
            entries = stores.rows.entries(stores.recurrent.pool, self.row)
            page = int(entries[length // stores.page_size - 1])
        return page

    def grow(self, to_len: int, num_drafts: int = 0) -> list[TableWrite]:
        """Allocate pages for [capacity_len, to_len) and for the states that a forward ending at
        `to_len` writes, its last `num_drafts` positions being drafts. The caller has checked
        `missing_pages` and has evicted enough.
        """
        stores, start = self._stores, self.num_pages
        missing = pages_for(to_len, stores.page_size) - start
        if self.states.pool is not None:
            self.states.allocate(self.computed_len, to_len, num_drafts, self.holder)
        if missing <= 0:
            return []
        writes, entries = [], stores.rows.entries
        for pool, private in self._private.items():
            # Consecutive pages let attention read a strided view, see `cache.pages`.
            last = private[-1] if private else start and entries(pool, self.row)[start - 1]
            after = PageId(int(last)) if last else None
            allocated = stores.allocators[pool].acquire(missing, self.holder, after=after)
            writes.append(stores.rows.write(pool, self.row, start, allocated))
            private.extend(allocated)
        return writes

    def mark(self, base_len: int, reuse_len: int) -> None:
        """Rewind to `base_len`, where a turn begins, and keep what a rollback to there needs until
        `park`. Positions from `reuse_len` on are recomputed, even if their KV is valid.
        """
        self._stores.rows.begin_changes(self.row)
        self.rewind(base_len)
        self._base_len = self.computed_len
        self.cut(reuse_len)

    def cut(self, to_len: int) -> None:
        """Rewind a lease that is marked to `to_len`; the mark lies there at most."""
        self.rewind(to_len)
        self._mark_len = min(self._base_len, self.computed_len)
        if self._stores.bounded:
            self._stores.tree.mark(self.receipt, self.protected_len)

    def extend_match(self, tokens: Tokens) -> list[TableWrite]:
        """Lock what the tree holds of `tokens`, which follow `protected_len`, if that reaches
        further than `computed_len`. It replaces the private pages, which are freed.
        """
        match = self._stores.tree.match_after(self.receipt, tokens)
        if self.protected_len + match.matched_len <= self.computed_len:
            return []
        if self._page_at_mark() == self._protected_pages:
            # The turn began inside the first private page: a rollback to there needs that page.
            self._keep_for_rollback({pool: pages[:1] for pool, pages in self._private.items()})
            for pages in self._private.values():
                pages[0] = NULL_PAGE  # so that the next line does not free it
        self._drop_private(0)
        self.states.drop_beyond(0, self.holder)
        start = self._protected_pages
        locked = self._stores.tree.advance(self.receipt, match)
        self.computed_len = self.protected_len
        rows = self._stores.rows
        writes = [rows.write(pool, self.row, start, pages) for pool, pages in locked.items()]
        self._clear_unlocked_entries(start)
        # Without the recurrent pool: each forward's `StateMoves` names its pages.
        return [write for write in writes if write.pool != self.states.pool]

    def release_rollback_page(self) -> bool:
        """Free the page that is kept only for a rollback, which then ends at a page boundary;
        return whether there was one."""
        had_pages = bool(self._rollback_pages)
        for pool, pages in self._rollback_pages.items():
            self._stores.allocators[pool].release(pages, self.holder)
        self._rollback_pages = {}
        self.states.release_rollback_state(self.holder)
        return had_pages

    def advance(self, computed_len: int) -> None:
        """Set `computed_len`, and in bounded pools free the pages that no forward reads again.

        Pages that a forward at the last whole page reads stay, so that another session can continue
        from what will be published.
        """
        before_len = self.computed_len
        self.computed_len = computed_len
        if self._stores.bounded:
            self.release_passed(before_len)

    def release_passed(self, before_len: int) -> None:
        """Do so in bounded pools, after `computed_len` has grown from `before_len`."""
        stores, computed_len, start = self._stores, self.computed_len, self._protected_pages
        # A rollback to the mark reads the pages before it.
        kept = pages_for(self._mark_len, stores.page_size)
        self.states.release_superseded(computed_len, self._mark_len, self.holder)
        for component in stores.bounded.values():
            pool = component.pool
            private = self._private.get(pool, [])
            first = component.first_page(computed_len - computed_len % stores.page_size)
            # Earlier calls have freed what the window had passed: look only at what it passes now,
            # so that a step costs nothing that grows with the history.
            passed = component.first_page(before_len - before_len % stores.page_size)
            begin, end = max(start, kept, passed), min(first, start + len(private))
            if begin >= end:
                continue
            dead = [page for page in private[begin - start : end - start] if page != NULL_PAGE]
            if dead:
                stores.rows.clear(pool, self.row, begin, end)
                stores.allocators[pool].release(dead, self.holder)
                private[begin - start : end - start] = [NULL_PAGE] * (end - begin)

    def publish(self, tokens: Tokens) -> list[TableWrite]:
        """Move the whole computed pages to the tree and lock them; return the entries of the row
        that name other pages now.

        Where the tree already has the same tokens, its pages replace ours in the row and ours are
        freed, so that one copy remains. `tokens`: int32 [n], those after `protected_len`, at least
        up to `computed_len`.

        Raises:
            AuditFailed: the lease is parked.
        """
        stores, start = self._stores, self._protected_pages
        num_pages = self.computed_len // stores.page_size - start
        if num_pages == 0:
            return []
        if self.holder is not Holder.ACTIVE:  # `insert` books ACTIVE -> TREE
            raise AuditFailed("only a lent lease publishes")
        ours = {pool: pages[:num_pages] for pool, pages in self._private.items()}
        if self.states.pool is not None:
            ours[self.states.pool] = self.states.take_snapshots(start, num_pages)
        theirs = stores.tree.insert(self.receipt, tokens[: num_pages * stores.page_size], ours)
        self._keep_replaced_page(start, ours, theirs)
        writes = []
        for pool, known in theirs.items():
            # `known` ends with the tree's own pages; all later ones were ours and stay in place.
            replaced = [mine for mine, its in zip(ours[pool], known, strict=False) if mine != its]
            if replaced:
                kept = self._rollback_pages.get(pool, ())
                freed = (page for page in replaced if page != NULL_PAGE and page not in kept)
                stores.allocators[pool].release(freed, self.holder)
            if pool == self.states.pool:
                # A row names states only once they are snapshots, so these entries are all new. The
                # device does not need them: each forward is sent its own `StateMoves`.
                self._repoint(pool, start, known + ours[pool][len(known) :])
            elif replaced:
                writes.append(self._repoint(pool, start, known))
        for private in self._private.values():
            del private[:num_pages]
        self._clear_unlocked_entries(start)
        return writes

    def rewind(self, to_len: int) -> None:
        """Invalidate KV past `to_len` and free the whole pages past it.

        Published pages past it stay in the tree, unlocked.
        """
        target = self.rewound_len(to_len)
        if target < self.protected_len:
            # The tree's pages are shared and must not be overwritten: a page that `to_len` cuts is
            # unlocked as a whole.
            self._shorten_lock(target)
            target = self.protected_len
        self.computed_len = target
        self.states.drop_beyond(target, self.holder)
        self._drop_private(pages_for(target, self._stores.page_size) - self._protected_pages)

    def roll_back(self, to_len: int, tokens: Tokens) -> list[TableWrite]:
        """Undo the turn's positions past `to_len`.

        Unlike `rewind`, first remove published pages from the tree that only this lease uses, so
        that the page which `to_len` cuts is private again and stays. `to_len` is not less than
        where the turn began; `tokens`: int32 [n], the whole history.
        """
        taken = self._stores.tree.unpublish(self.receipt, to_len, self.holder)
        start = self._protected_pages
        for pool, pages in taken.items():
            if pool == self.states.pool:
                self.states.put_snapshots_back(start, pages)
                self._stores.rows.clear(pool, self.row, start, start + len(pages))
                continue
            self._private[pool][:0] = pages
            # In a bounded pool the row may name them no longer; the device's copy still does, so
            # there is nothing to send.
            self._repoint(pool, start, pages)
        # Another session has locked the tree's copy of the page at the mark: use the kept one.
        if self._rollback_pages and self.rewound_len(to_len) < self._mark_len:
            return self._restore_rollback_pages()
        self.rewind(to_len)
        if self.computed_len < self._base_len:
            # For instance because `mark` cut valid KV at `reuse_len`: the tree may still have it.
            return self.extend_match(tokens[self.protected_len : self._base_len])
        return []

    def _page_at_mark(self) -> int | None:
        """Return the index of the page that the mark cuts; None if the mark is a page boundary or
        that page is kept already."""
        index, offset = divmod(self._mark_len, self._stores.page_size)
        return index if offset and not self._rollback_pages else None

    def _keep_replaced_page(self, start: int, ours: PagesByPool, theirs: PagesByPool) -> None:
        """Keep the page that the mark cuts, if publishing has replaced it in every pool.
        `unpublish` cannot take the tree's copy once another session has locked it."""
        if self._page_at_mark() == start and all(
            theirs[pool] and theirs[pool][0] != ours[pool][0] for pool in self._private
        ):
            self._keep_for_rollback({pool: ours[pool][:1] for pool in self._private})

    def _keep_for_rollback(self, pages: PagesByPool) -> None:
        self._rollback_pages = pages
        self.states.keep_for_rollback(self._mark_len)

    def _restore_rollback_pages(self) -> list[TableWrite]:
        """Put the page kept for a rollback back into the row, and cut the lease at the mark."""
        self._shorten_lock(self._mark_len)
        start, pages, self._rollback_pages = self._protected_pages, self._rollback_pages, {}
        self._private.update(pages)
        self.computed_len = self._mark_len
        self.states.drop_beyond(0, self.holder)
        self.states.restore_rollback_state()
        return [self._stores.rows.write(p, self.row, start, ids) for p, ids in pages.items()]

    def _shorten_lock(self, to_len: int) -> None:
        """Free the private pages and unlock those past the last whole page of `to_len`."""
        self._drop_private(0)
        kept_pages = to_len // self._stores.page_size
        for pool in self._stores.ledgers:
            self._stores.rows.clear(pool, self.row, kept_pages, self._protected_pages)
        self._stores.tree.shorten(self.receipt, to_len)

    def rewound_len(self, to_len: int) -> int:
        """Return what `rewind` leaves of `computed_len`: the longest length <= `to_len` that a
        forward can continue from with the pages held; whole pages within the protected part.
        """
        rows, page_size = self._stores.rows, self._stores.page_size
        # Rounding down to a page, or one pool's missing pages, can cut what another pool had
        # accepted: repeat until nothing changes.
        length, reach = -1, min(self.computed_len, to_len)
        while reach != length:
            length = reach
            for component in self._stores.bounded.values():
                entries = rows.entries(component.pool, self.row)
                if component is self._stores.recurrent:
                    # The row has snapshots of published pages only; later states are private.
                    snapshot = component.continuable_len(entries, min(reach, self.protected_len))
                    reach = max(snapshot, self.states.longest_len(reach))
                else:
                    reach = component.continuable_len(entries, reach)
            if reach < self.protected_len:
                reach -= reach % page_size
        return length

    def lend(self) -> None:
        """Book the private pages SESSION_HELD -> ACTIVE."""
        self._transfer_private(Holder.SESSION_HELD, Holder.ACTIVE)

    def park(self) -> None:
        """Book the private pages ACTIVE -> SESSION_HELD and drop the mark."""
        self.unmark()
        self._transfer_private(Holder.ACTIVE, Holder.SESSION_HELD)

    def unmark(self) -> None:
        """Free what only a rollback to the mark needs."""
        self.release_rollback_page()
        self._base_len = self._mark_len = 0
        self.states.keep_only(self.computed_len, self.holder)
        if self._stores.bounded:
            self._stores.tree.mark(self.receipt, None)
            self._clear_unlocked_entries(self._protected_pages)

    def release(self) -> None:
        """Free the private pages, the lock and the row. The lease must not be used afterwards."""
        self.release_rollback_page()
        self._drop_private(0)
        self.states.drop_beyond(0, self.holder)
        for pool in self._stores.ledgers:
            first = self._first_entry.get(pool, 0)
            self._stores.rows.clear(pool, self.row, first, self._protected_pages)
        self._stores.tree.unlock(self.receipt)
        self._stores.rows.free(self.row)

    def quarantine(self) -> None:
        """Release the lease without freeing pages: its private pages, and the published pages that
        no other lease has locked, are never used again. For content or accounts in doubt.
        """
        stores = self._stores
        # The whole row: where its pages end cannot be trusted either.
        for pool in stores.ledgers:
            stores.rows.clear(pool, self.row, 0, stores.rows.row_pages)
        for pool, pages in stores.tree.remove_path(self.receipt).items():
            stores.ledgers[pool].transfer(len(pages), Holder.TREE, Holder.QUARANTINE)
            stores.quarantined[pool].extend(pages)
        for pool, private in self._private.items():
            held = self.private_pages(pool)
            stores.ledgers[pool].transfer(len(held), self.holder, Holder.QUARANTINE)
            stores.quarantined[pool].extend(held)
            private.clear()
        self._rollback_pages = {}
        self.states.quarantine(self.holder)
        stores.rows.free(self.row)

    @property
    def _protected_pages(self) -> int:
        return self.receipt.length // self._stores.page_size

    def _drop_private(self, num_kept: int) -> None:
        """Free private pages from index `num_kept` on."""
        stores, start = self._stores, self._protected_pages
        for pool, pages in self._private.items():
            if num_kept < len(pages):
                stores.rows.clear(pool, self.row, start + num_kept, start + len(pages))
                stores.allocators[pool].release(filter(None, pages[num_kept:]), self.holder)
                del pages[num_kept:]

    def _repoint(self, pool: PoolName, start: int, pages: list[int]) -> TableWrite:
        """Replace entries of the row from index `start` on."""
        rows = self._stores.rows
        # In a bounded pool an entry may be `NULL_PAGE` by now, which `rows.repoint` refuses.
        if pool in self._stores.bounded:
            rows.clear(pool, self.row, start, start + len(pages))
            return rows.write(pool, self.row, start, pages)
        return rows.repoint(pool, self.row, start, pages)

    def _clear_unlocked_entries(self, named_from: int) -> None:
        """Clear the row's entries for pages of the tree that this lease no longer locks.

        `named_from`: the protected entries from this page on were written since the last call.
        """
        rows = self._stores.rows
        for component in self._stores.bounded.values():
            pool = component.pool
            (mark_start, mark_end), (start, _) = self.locked_spans(component)
            first_entry = min(self._first_entry[pool], named_from)
            if mark_start < mark_end:  # two windows are locked: clear before and between them
                rows.clear(pool, self.row, first_entry, mark_start)
                rows.clear(pool, self.row, max(first_entry, mark_end), start)
                self._first_entry[pool] = mark_start
            else:
                rows.clear(pool, self.row, first_entry, start)
                self._first_entry[pool] = start

    def _transfer_private(self, source: Holder, target: Holder) -> None:
        if self.holder is not source:
            raise AuditFailed(f"the lease of row {self.row} is not {source.name}")
        for pool, pages in self._private.items():
            num_pages = len(pages) - pages.count(NULL_PAGE)
            self._stores.ledgers[pool].transfer(num_pages, source, target)
        self.states.transfer(source, target)
        self.holder = target
