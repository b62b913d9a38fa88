"""`KVLease`: what one session holds in the pools, and the only code that moves it.

A lease is a row, a lock on the published part, the private pages that follow it, and how far the
content is valid. Lengths are derived from those, so they cannot disagree with them:

    protected_len = what the lock covers     <= computed_len     <= capacity_len = pages * page_size
"""

from __future__ import annotations

from cache.errors import AuditFailed
from cache.radix import LockReceipt, PagesByPool
from cache.stores import KVStores
from cache.types import (
    Holder,
    Namespace,
    PageId,
    PoolName,
    RowId,
    TableWrite,
    Tokens,
    pages_for,
)


class KVLease:
    """Owned by a slot, borrowed by at most one turn. Every method leaves books and table in step.

    `computed_len`: tokens whose KV is valid. `holder`: the account of the private pages, ACTIVE
    while lent and SESSION_HELD while parked.
    """

    __slots__ = ("_private", "_stores", "computed_len", "holder", "receipt", "row")

    def __init__(self, stores: KVStores, namespace: Namespace) -> None:
        """Take a row, hold no pages; lent from the start.

        Raises:
            OutOfRows: nothing was taken.
        """
        self._stores = stores
        self.row: RowId = stores.rows.alloc()
        self.receipt: LockReceipt = stores.tree.lock_root(namespace)
        self._private: PagesByPool = {component.pool: [] for component in stores.components}
        self.computed_len = 0
        self.holder = Holder.ACTIVE

    @property
    def protected_len(self) -> int:
        """Tokens in pages the tree owns and this lease has locked."""
        return self.receipt.length

    @property
    def capacity_len(self) -> int:
        """Tokens its pages have room for."""
        return self.num_pages * self._stores.page_size

    @property
    def num_pages(self) -> int:
        """Pages of the row, per pool: locked and private."""
        return self._protected_pages + min(map(len, self._private.values()))

    def private_pages(self, pool: PoolName) -> tuple[int, ...]:
        """Pages of one pool that no other session can see, in order of position."""
        return tuple(self._private[pool])

    def num_private(self, pool: PoolName) -> int:
        """How many `private_pages` there are."""
        return len(self._private[pool])

    def missing_pages(self, to_len: int) -> int:
        """Pages (per pool) that `grow` would have to buy."""
        return max(0, pages_for(to_len, self._stores.page_size) - self.num_pages)

    def grow(self, to_len: int) -> list[TableWrite]:
        """Buy pages for [capacity_len, to_len). The caller has seen to it that they are free."""
        stores, start = self._stores, self.num_pages
        missing = self.missing_pages(to_len)
        if missing == 0:
            return []
        writes = []
        for pool, private in self._private.items():
            entries = stores.rows.entries(pool, self.row)
            last = PageId(int(entries[start - 1])) if start else None
            bought = stores.allocators[pool].acquire(missing, self.holder, after=last)
            writes.append(stores.rows.write(pool, self.row, start, bought))
            private.extend(bought)
        return writes

    def extend_match(self, tokens: Tokens) -> list[TableWrite]:
        """Adopt what the tree holds of the tokens after `protected_len`, if it reaches further
        than what is computed. The private pages it replaces are freed.
        """
        tree = self._stores.tree
        match = tree.match_below(self.receipt, tokens)
        found_len = self.protected_len + match.matched_len
        reusable = min(c.reusable_len(found_len) for c in self._stores.components)
        if reusable <= self.computed_len:
            return []
        if reusable < found_len:
            match = tree.match_below(self.receipt, tokens[: reusable - self.protected_len])
        self._drop_private(0)
        start = self._protected_pages
        locked = tree.advance(self.receipt, match)
        self.computed_len = self.protected_len
        return [
            self._stores.rows.write(pool, self.row, start, pages) for pool, pages in locked.items()
        ]

    def publish(self, tokens: Tokens) -> list[TableWrite]:
        """Give the whole computed pages to the tree and lock them.

        Where the tree has the same tokens already, its pages replace ours in the row and ours are
        freed: one copy stays.

        Args:
            tokens: what follows `protected_len`, at least up to `computed_len`.
        """
        stores, start = self._stores, self._protected_pages
        num_pages = self.computed_len // stores.page_size - start
        if num_pages == 0:
            return []
        ours = {pool: pages[:num_pages] for pool, pages in self._private.items()}
        if self.holder is not Holder.ACTIVE:
            raise AuditFailed("only a lent lease publishes")
        theirs = stores.tree.insert(self.receipt, tokens[: num_pages * stores.page_size], ours)
        writes = []
        for pool, replaced in theirs.items():
            del self._private[pool][:num_pages]
            if replaced:
                stores.allocators[pool].release(ours[pool][: len(replaced)], self.holder)
                writes.append(stores.rows.repoint(pool, self.row, start, replaced))
        return writes

    def rewind(self, to_len: int) -> None:
        """Forget content past `to_len` and free the whole pages past it.

        Published pages stay in the tree, unlocked; a page that `to_len` cuts and the tree owns is
        given up as a whole, because it must not be overwritten.
        """
        components = self._stores.components
        target = min(c.rewind_len(self.computed_len, to_len) for c in components)
        if target < self.protected_len:
            self._drop_private(0)
            kept_pages = target // self._stores.page_size
            for pool in self._private:
                self._stores.rows.clear(pool, self.row, kept_pages, self._protected_pages)
            self._stores.tree.shorten(self.receipt, target)
            target = self.protected_len
        self.computed_len = target
        self._drop_private(pages_for(target, self._stores.page_size) - self._protected_pages)

    def roll_back(self, to_len: int) -> None:
        """Undo: like `rewind`, but published pages that only this lease uses are taken back, so
        that the page `to_len` cuts becomes private again and stays.
        """
        taken = self._stores.tree.take_back(self.receipt, to_len, self.holder)
        for pool, pages in taken.items():
            self._private[pool][:0] = pages
        self.rewind(to_len)

    def lend(self) -> None:
        """Private pages SESSION_HELD -> ACTIVE."""
        self._rebook(Holder.SESSION_HELD, Holder.ACTIVE)

    def park(self) -> None:
        """Private pages ACTIVE -> SESSION_HELD."""
        self._rebook(Holder.ACTIVE, Holder.SESSION_HELD)

    def release(self) -> None:
        """Free the private pages, unlock, give the row back. The lease is dead afterwards."""
        self._drop_private(0)
        self._clear_row()
        self._stores.tree.unlock(self.receipt)
        self._stores.rows.free(self.row)

    def quarantine(self) -> None:
        """Like `release`, for pages whose content or books are in doubt: neither they nor the
        published pages that nobody else has locked are ever used again.
        """
        stores = self._stores
        for pool in self._private:
            stores.rows.clear(pool, self.row, 0, stores.rows.row_pages)
        condemned = stores.tree.condemn(self.receipt)
        for pool, private in self._private.items():
            stores.ledgers[pool].transfer(len(private), self.holder, Holder.QUARANTINE)
            stores.ledgers[pool].transfer(len(condemned[pool]), Holder.TREE, Holder.QUARANTINE)
            stores.quarantined[pool].extend(private + condemned[pool])
            private.clear()
        stores.rows.free(self.row)

    @property
    def _protected_pages(self) -> int:
        return self.receipt.length // self._stores.page_size

    def _drop_private(self, num_kept: int) -> None:
        """Free private pages from index `num_kept` on."""
        stores, start = self._stores, self._protected_pages
        for pool, pages in self._private.items():
            stores.rows.clear(pool, self.row, start + num_kept, start + len(pages))
            stores.allocators[pool].release(pages[num_kept:], self.holder)
            del pages[num_kept:]

    def _clear_row(self) -> None:
        for pool in self._private:
            self._stores.rows.clear(pool, self.row, 0, self._protected_pages)

    def _rebook(self, source: Holder, target: Holder) -> None:
        if self.holder is not source:
            raise AuditFailed(f"the lease of row {self.row} is not {source.name}")
        for pool, pages in self._private.items():
            self._stores.ledgers[pool].transfer(len(pages), source, target)
        self.holder = target
