"""`LockOwners`: count the pages that one receipt alone keeps from being evicted, in O(1) per lock.

Cooling a session makes the pages evictable that no other receipt has locked. Which pages those are
changes whenever another receipt locks or unlocks a page that they share. So an edge (in bounded
pools: a page) stores the exclusive or of the numbers of the receipts that have locked it. When one
lock is left, that value is the number of its owner, so no list of sharers is needed.
"""

from __future__ import annotations

from collections import Counter

from cache.errors import AuditFailed
from cache.radix_node import LockReceipt
from cache.types import PoolName


class Tally:
    """Sum, over some receipts, what each of them alone keeps from being evicted.

    `num_tokens`: tokens of edges, for unbounded pools. `num_pages`: pages per bounded pool.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_pages: Counter[PoolName] = Counter()


class LockOwners:
    """Number the receipts, and count what each of them alone has locked."""

    def __init__(self) -> None:
        self._receipts: list[LockReceipt | None] = []
        self._tallies: list[Tally | None] = []
        self._free_numbers: list[int] = []

    def register(self, receipt: LockReceipt) -> None:
        """Assign a number to a new receipt."""
        if not self._free_numbers:
            self._free_numbers.append(len(self._receipts))
            self._receipts.append(None)
            self._tallies.append(None)
        receipt._number = self._free_numbers.pop()
        self._receipts[receipt._number] = receipt

    def unregister(self, receipt: LockReceipt) -> None:
        """Free the number of a receipt that has unlocked everything.

        Raises:
            AuditFailed: some page still counts as locked by it alone.
        """
        if receipt.sole_tokens or any(receipt.sole_pages.values()):
            raise AuditFailed("a receipt was given back that alone keeps pages locked")
        self.assign(receipt, None)
        self._receipts[receipt._number] = None
        self._free_numbers.append(receipt._number)

    def assign(self, receipt: LockReceipt, tally: Tally | None) -> None:
        """Move a receipt to another tally, or to none."""
        before = self._tallies[receipt._number]
        self._tallies[receipt._number] = tally
        for each, sign in ((before, -1), (tally, +1)):
            if each is not None:
                each.num_tokens += sign * receipt.sole_tokens
                for pool, num_pages in receipt.sole_pages.items():
                    each.num_pages[pool] += sign * num_pages

    def add_tokens(self, number: int, num_tokens: int) -> None:
        """Add tokens of edges to what a receipt alone has locked; negative to subtract."""
        self._receipt(number).sole_tokens += num_tokens
        if (tally := self._tallies[number]) is not None:
            tally.num_tokens += num_tokens

    def add_pages(self, number: int, pool: PoolName, num_pages: int) -> None:
        """Add pages of a bounded pool to what a receipt alone has locked; negative to subtract."""
        self._receipt(number).sole_pages[pool] += num_pages
        if (tally := self._tallies[number]) is not None:
            tally.num_pages[pool] += num_pages

    def _receipt(self, number: int) -> LockReceipt:
        receipt = self._receipts[number] if 0 <= number < len(self._receipts) else None
        if receipt is None:
            raise AuditFailed(f"a page is locked by receipt {number}, which does not exist")
        return receipt
