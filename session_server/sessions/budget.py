"""Count what owners hold (sessions, turns, bytes) against limits per owner and in total."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from session_server.core.errors import QuotaExceeded, ServerBusy
from session_server.core.owner import Owner

RESERVED_PART: Final = 0.1
"""Part of a limit reserved for owners that hold no more than `FEW_PART` of it."""

FEW_PART: Final = 0.01


class OwnerBudget:
    """Count one kind of resource per owner and in total; an owner that holds nothing costs nothing.

    `limit` bounds the total. An owner whose share is a part of the whole holds at most that part
    of it, and takes from the reserve (the last tenth) only while it holds at most a hundredth:
    owners that hold much do not lock out those that hold little. An owner whose share is the
    whole is bounded by `limit` alone. `owner_limit` bounds each owner besides. An exempt owner is
    counted and never rejected. `limit_of` bounds each owner by what it is granted itself.
    """

    def __init__(
        self,
        noun: str,
        limit: int,
        *,
        owner_limit: int | None = None,
        limit_of: Callable[[Owner], int | None] = lambda _owner: None,
    ) -> None:
        """Set the limits. `noun` is what is counted, in the plural, as clients read it in an error
        message."""
        self.is_approximate = False
        """Whether others count too, so that more may be given back here than was counted here:
        `recount` says now and then what there is."""

        self._limit_of = limit_of
        self._noun = noun
        self._limit = limit
        self._owner_limit = limit if owner_limit is None else owner_limit
        self._held: dict[Owner, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Return what all owners hold together."""
        return self._total

    @property
    def limit(self) -> int:
        """Return what all owners may hold together."""
        return self._limit

    @property
    def is_in_reserve(self) -> bool:
        """Return whether all owners hold so much that those with a share get no more than few."""
        return self._total > self._limit - int(self._limit * RESERVED_PART)

    @property
    def owners(self) -> frozenset[Owner]:
        """Return the owners that hold anything."""
        return frozenset(self._held)

    def held_by(self, owner: Owner) -> int:
        """Return what one owner holds."""
        return self._held.get(owner, 0)

    def check(self, owner: Owner, amount: int) -> None:
        """Reject an amount that would exceed a limit; count nothing.

        Raises:
            ServerBusy: the server would hold more than `limit`.
            QuotaExceeded: the owner would hold more than its share, or more than it may now.
        """
        if owner.is_exempt:
            return
        total, held = self._total + amount, self.held_by(owner) + amount
        # More than its share is never allowed, however little others hold.
        is_bounded = owner.share < 1.0 or self._limit_of(owner) is not None
        is_own_fault = is_bounded and held > self._allowed(owner, 0)
        if total > self._limit and not is_own_fault:
            raise ServerBusy(f"the server would hold {total:,} {self._noun} of {self._limit:,}")
        allowed = self._allowed(owner, 0 if is_own_fault else total)
        if held > allowed:
            raise QuotaExceeded(f"you would hold {held:,} {self._noun}, and may hold {allowed:,}")

    def has_room_for(self, owner: Owner, amount: int) -> bool:
        """Return whether an owner could hold this amount if nobody held anything."""
        return amount <= self.most(owner)

    def most(self, owner: Owner) -> int:
        """Return what an owner could hold if nobody held anything."""
        return min(self._limit, self._allowed(owner, 0))

    def take(self, owner: Owner, amount: int = 1) -> None:
        """Count what `check` allows. Raises like `check`, with nothing counted."""
        self.check(owner, amount)
        self.add(owner, amount)

    @contextlib.contextmanager
    def held(self, owner: Owner, amount: int) -> Iterator[None]:
        """Count an amount during the block. Raises like `check`, with nothing counted."""
        self.take(owner, amount)
        try:
            yield
        finally:
            self.add(owner, -amount)

    def add(self, owner: Owner, amount: int) -> None:
        """Count an amount without a check; a negative amount is given back."""
        held = self.held_by(owner) + amount
        if self.is_approximate:
            held = max(0, held)
        assert held >= 0, f"{self._noun} were given back twice"
        self.recount(owner, held)

    def recount(self, owner: Owner, held: int) -> None:
        """Set what one owner holds."""
        self._total += held - self.held_by(owner)
        if held:
            self._held[owner] = held
        else:
            self._held.pop(owner, None)

    def _allowed(self, owner: Owner, total: int) -> int:
        """Return what `owner` may hold when all hold `total`."""
        granted = self._limit_of(owner)
        allowed = self._share_of(owner, total)
        return allowed if granted is None else max(0, min(allowed, granted))

    def _share_of(self, owner: Owner, total: int) -> int:
        if owner.share == 1.0:
            return self._owner_limit
        if total > self._limit - int(self._limit * RESERVED_PART):
            return min(self._owner_limit, max(1, int(self._limit * FEW_PART)))
        return min(self._owner_limit, max(1, int(self._limit * owner.share)))
