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


def share_len(budget: int) -> int:
    """Return the tokens that every need can count on."""
    return max(1, budget // MAX_SHARES)


def fair_shares(needs: Sequence[int], budget: int, *, first: Sequence[int]) -> list[int]:
    """Return the tokens of each need, at most `budget` in all.

    Small needs are met whole, smallest first, while each asks for no more than an even split among
    `MAX_SHARES`. The rest is split max-min fairly over as many of the others as can have a share:
    the indices in `first`, in that order, then the smallest, which are done soonest. Tokens left
    over go to the others in order.

    Args:
        needs: tokens that each can use.
        budget: tokens of the forward.
        first: indices of needs that get their share in any case, if the budget has one for each.
    """
    if sum(needs) <= budget:
        return list(needs)
    kept = {i: min(needs[i], share_len(budget)) for i in first if i < len(needs)}
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
    chosen = list(dict.fromkeys([*kept, *order[num_met:]]))[: left // share_len(budget)]
    for rank, i in enumerate(sorted(chosen, key=lambda i: needs[i])):
        shares[i] = min(needs[i], left // (len(chosen) - rank))
        left -= shares[i]
    for i, need in enumerate(needs):
        extra = min(need - shares[i], left)
        shares[i] += extra
        left -= extra
    return shares
