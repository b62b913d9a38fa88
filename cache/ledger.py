"""`Ledger`: keep double-entry page accounts of one pool.

Every page is in exactly one account, so the accounts always sum to the pool. `transfer` is the only
way to move a page, and it fails at the call that is wrong instead of in a later audit. The TREE
account is split into protected and evictable pages; `protect` and `unprotect` follow the locks.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.errors import AuditFailed
from cache.types import Holder, PoolName


@dataclass(frozen=True, slots=True)
class Accounts:
    """Describe one pool at one moment, in pages. The fields after `pages` sum to it; they
    are in the order of `Holder`, with TREE in two."""

    pool: PoolName
    pages: int
    free: int
    reserved: int
    tree_evictable: int
    tree_protected: int
    active: int
    session_held: int
    fenced: int
    spill: int
    quarantine: int


class Ledger:
    """Hold the accounts of one pool. At first page 0 is RESERVED and all others are FREE."""

    def __init__(self, pool: PoolName, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs a page beside the padding page, got {num_pages}")
        self.pool = pool
        self.num_pages = num_pages
        self._accounts = [0] * len(Holder)
        self._accounts[Holder.RESERVED] = 1
        self._accounts[Holder.FREE] = num_pages - 1
        self._num_protected = 0

    def transfer(self, num_pages: int, source: Holder, target: Holder) -> None:
        """Move pages from one account to another.

        Pages leave and enter TREE as evictable ones: unprotect locked pages first.

        Raises:
            AuditFailed: `source` does not hold that many; nothing was moved.
        """
        available = self.num_evictable if source is Holder.TREE else self._accounts[source]
        if not 0 <= num_pages <= available or Holder.RESERVED in (source, target):
            raise AuditFailed(
                f"{self.pool}: {num_pages} pages {source.name} -> {target.name}, "
                f"{available} are there"
            )
        self._accounts[source] -= num_pages
        self._accounts[target] += num_pages

    def protect(self, num_pages: int) -> None:
        """Mark `num_pages` TREE pages as protected, when their first lock is taken.

        Raises:
            AuditFailed: fewer are evictable.
        """
        if not 0 <= num_pages <= self.num_evictable:
            raise AuditFailed(f"{self.pool}: protecting {num_pages} of {self.num_evictable}")
        self._num_protected += num_pages

    def unprotect(self, num_pages: int) -> None:
        """Mark `num_pages` TREE pages as evictable, when their last lock is released.

        Raises:
            AuditFailed: fewer are protected.
        """
        if not 0 <= num_pages <= self._num_protected:
            raise AuditFailed(f"{self.pool}: exposing {num_pages} of {self._num_protected}")
        self._num_protected -= num_pages

    @property
    def num_evictable(self) -> int:
        """Return the TREE pages that no lock covers."""
        return self._accounts[Holder.TREE] - self._num_protected

    @property
    def num_free(self) -> int:
        """Return the free pages."""
        return self._accounts[Holder.FREE]

    @property
    def num_quarantined(self) -> int:
        """Return the pages that nobody gets before a restart."""
        return self._accounts[Holder.QUARANTINE]

    def is_balanced(self) -> bool:
        """Return whether the accounts sum to the pool and none is negative: level 0 of the memory
        check. O(1)."""
        return (
            sum(self._accounts) == self.num_pages
            and min(self._accounts) >= 0
            and 0 <= self._num_protected <= self._accounts[Holder.TREE]
        )

    def snapshot(self) -> Accounts:
        """Return the accounts as they are now, for reports and plans."""
        free, reserved, _, *private = self._accounts
        tree = (self.num_evictable, self._num_protected)
        return Accounts(self.pool, self.num_pages, free, reserved, *tree, *private)
