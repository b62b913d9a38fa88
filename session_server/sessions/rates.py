"""`OwnerRate`: limit what each owner asks for per minute."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from session_server.core.errors import QuotaExceeded
from session_server.core.owner import Owner

PAID_AT_ONCE: Final = 256
"""Owners whose bucket may be full again that are looked at before others are served."""

_MINUTE_S: Final = 60.0


@dataclass(slots=True)
class _Debt:
    """Hold what of one owner was not yet refilled at `paid_at_s`."""

    num_owed: float = 0.0
    paid_at_s: float = 0.0


class OwnerRate:
    """Count against a bucket per owner that refills steadily and holds one minute's worth."""

    def __init__(
        self,
        noun: str,
        per_min: int | None,
        *,
        rate_of: Callable[[Owner], int | None] = lambda _owner: None,
    ) -> None:
        """Set the rate of owners for whom `rate_of` gives none; None: no limit. `noun`: what is
        counted, in the plural."""
        self._noun = noun
        self._per_min = per_min
        self._rate_of = rate_of
        self._debts: dict[Owner, _Debt] = {}
        self._full_at: list[tuple[float, str, Owner]] = []
        """A heap with one entry per debt: not later than the moment at which it is paid."""

    @property
    def owners(self) -> frozenset[Owner]:
        """Return the owners whose bucket is not full."""
        return frozenset(self._debts)

    def rate(self, owner: Owner) -> int | None:
        """Return what an owner may ask for per minute; None for no limit."""
        granted = self._rate_of(owner)
        return self._per_min if granted is None else granted

    def used(self, owner: Owner, *, now_s: float) -> int:
        """Return what of its bucket an owner has used now, rounded up."""
        debt, rate = self._debts.get(owner), self.rate(owner)
        if debt is None or rate is None:
            return 0
        _refill(debt, rate, now_s)
        return math.ceil(debt.num_owed)

    def refilled_in_s(self, owner: Owner, *, now_s: float) -> float:
        """Return the seconds until an owner's bucket is full again; 0 if it is."""
        debt, rate = self._debts.get(owner), self.rate(owner)
        if debt is None or rate is None:
            return 0.0
        _refill(debt, rate, now_s)
        return debt.num_owed * _MINUTE_S / rate

    def check(self, owner: Owner, amount: int, *, now_s: float) -> None:
        """Reject what exceeds the rate; count nothing.

        A full bucket lets any amount through, so that a turn larger than a minute's worth is slow
        and not impossible. Raises QuotaExceeded when earlier turns have used up the rate.
        """
        rate, debt = self.rate(owner), self._debts.get(owner)
        if rate is None or debt is None or owner.is_exempt:
            return
        _refill(debt, rate, now_s)
        excess = min(debt.num_owed, debt.num_owed + amount - rate)
        if excess > 0:
            wait_s = excess * _MINUTE_S / rate
            # Clients of OpenAI read "try again in" where an event has no field for it.
            told = f"try again in {math.ceil(wait_s)} seconds"
            raise QuotaExceeded(
                f"{rate:,} {self._noun} per minute are used up: {told}", retry_after_s=wait_s
            )

    def charge(self, owner: Owner, amount: int, *, now_s: float) -> None:
        """Count what `check` allows. Raises QuotaExceeded, with nothing counted."""
        self.check(owner, amount, now_s=now_s)
        self.add(owner, amount, now_s=now_s)

    def add(self, owner: Owner, amount: int, *, now_s: float) -> None:
        """Count an amount without a check."""
        rate = self.rate(owner)
        if rate is None or owner.is_exempt or not amount:
            return
        debt = self._debts.get(owner)
        if debt is None:
            debt = self._debts[owner] = _Debt(paid_at_s=now_s)
            heapq.heappush(self._full_at, (now_s, owner.owner_id, owner))
        _refill(debt, rate, now_s)
        debt.num_owed += amount

    def drop_paid(self, now_s: float) -> bool:
        """Drop a slice of the owners whose bucket is full again; look only at those that may be.

        Returns:
            Whether there may be more than are looked at at a time.
        """
        for _ in range(PAID_AT_ONCE):
            if not self._full_at or self._full_at[0][0] > now_s:
                return False
            owner = heapq.heappop(self._full_at)[-1]
            full_at_s = now_s + self.refilled_in_s(owner, now_s=now_s)
            if full_at_s > now_s:
                heapq.heappush(self._full_at, (full_at_s, owner.owner_id, owner))
            else:
                del self._debts[owner]
        return True


def _refill(debt: _Debt, rate: int, now_s: float) -> None:
    elapsed_s = max(0.0, now_s - debt.paid_at_s)
    debt.num_owed = max(0.0, debt.num_owed - elapsed_s * rate / _MINUTE_S)
    debt.paid_at_s = now_s
