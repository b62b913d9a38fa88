"""Split the tokens of one forward fairly: a pure function.

Every need gets at least its share: `budget // MAX_SHARES`, or all of it if that is less. The
exception is a forward of which at least half goes to needs that are no larger. So a turn waits for
turns that finish before it, and never for long ones, however long or many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_SHARES: Final = 8
"""Long needs that share one forward. With more of them every first token would be late."""

FLOOD_SHARES: Final = 2
"""Shares of a forward in a flood while nobody is behind: whoever comes waits for it to end."""


def share_len(budget: int) -> int:
    """Return the tokens that every need can count on."""
    return max(1, budget // MAX_SHARES)


def fair_shares(
    needs: Sequence[int], budget: int, *, first: Sequence[int], share: int | None = None
) -> list[int]:
    """Return the tokens of each need, at most `budget` in all.

    Small needs are met whole, smallest first, while each asks for no more than an even split among
    `MAX_SHARES`. The rest is split max-min fairly over as many of the others as can have a share:
    the indices in `first`, in that order, then the smallest, which are done soonest. Tokens left
    over go to the others in order.

    Args:
        needs: tokens that each can use.
        budget: tokens of the forward.
        first: indices of needs that get their share in any case, if the budget has one for each.
        share: tokens that each can count on; an even split among `MAX_SHARES` by default.
    """
    share = share or share_len(budget)
    if sum(needs) <= budget:
        return list(needs)
    kept = {i: min(needs[i], share) for i in first[: budget // share] if i < len(needs)}
    order = sorted(range(len(needs)), key=lambda i: needs[i])
    shares, num_met, left = [0] * len(needs), 0, budget
    for rank, i in enumerate(order):
        even_split = left // min(len(order) - rank, MAX_SHARES)
        kept_for_others = sum(kept.values()) - kept.get(i, 0)
        if needs[i] > min(even_split, left - kept_for_others):
            break
        kept.pop(i, None)
        shares[i], num_met = needs[i], rank + 1
        left -= needs[i]
    chosen = list(dict.fromkeys([*kept, *order[num_met:]]))[: left // share]
    for rank, i in enumerate(sorted(chosen, key=lambda i: needs[i])):
        shares[i] = min(needs[i], left // (len(chosen) - rank))
        left -= shares[i]
    return _give(needs, shares, left)


def tenant_shares(needs: Sequence[int], budget: int, *, first: Sequence[int]) -> list[int]:
    """Return the tokens of each tenant, at most `budget` in all; who was served least comes first.

    The tenants in `first` and those served least, `MAX_SHARES` in all, get a share each, or what
    they need if that is less. What is left goes to all in order, so that a tenant which asks for
    little is served as fast as if it were nearly alone.

    Args:
        needs: tokens that the turns of each tenant can use together.
        budget: tokens of the forward.
        first: indices of tenants that get a share in any case, if the budget has one for each.
    """
    chosen = list(dict.fromkeys([*first, *range(len(needs))]))[:MAX_SHARES]
    shares, left = [0] * len(needs), budget
    for i in chosen:
        shares[i] = min(needs[i], share_len(budget), left)
        left -= shares[i]
    return _give(needs, shares, left)


def flooded_shares(
    needs: Sequence[int], budget: int, *, num_behind: int, first: Sequence[int], may_postpone: bool
) -> list[int]:
    """Return the tokens of each tenant in a flood: the forward is short, except for those behind.

    The first `num_behind` tenants split what they need, up to the budget, as in `tenant_shares`.
    All others together have one share beside them, none if the needs of those behind are met, and
    `FLOOD_SHARES` where nobody is behind.

    Args:
        needs: tokens that the turns of each tenant can use together, the least served first.
        budget: tokens of the forward.
        num_behind: how many tenants are behind the others.
        first: indices of tenants that get a share of their part in any case.
        may_postpone: whether the others may be left out, since the forward before had them.
    """
    behind, late = needs[:num_behind], needs[num_behind:]
    num_late = share_len(budget) * (1 if behind else FLOOD_SHARES)
    if behind and may_postpone and sum(behind) <= budget:
        num_late = 0
    num_late = min(sum(late), num_late, budget)
    shares = tenant_shares(behind, budget - num_late, first=[i for i in first if i < num_behind])
    late_first = [i - num_behind for i in first if i >= num_behind]
    return shares + tenant_shares(late, num_late, first=late_first)


def _give(needs: Sequence[int], shares: list[int], left: int) -> list[int]:
    """Give the tokens that are left to the first who can use them."""
    for i, need in enumerate(needs):
        extra = min(need - shares[i], left)
        shares[i] += extra
        left -= extra
    return shares
