"""Pages for running turns. If they run short, cool idle sessions, then retract younger turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from cache.types import TurnId
from session_server.engine.plan_budget import MAX_COOLED, Budget
from session_server.engine.scheduler_view import RunningTurn
from session_server.engine.shortage import Shortage, add_pages


class RunningClaims(msgspec.Struct, frozen=True, gc=False):
    """Hold what running turns get in this forward.

    `running`: turns that are not retracted, oldest first. `work`: tokens of those with pages.
    `retracted`: in order, each time the youngest first. `is_oldest_short`: the oldest turn lacks
    pages although everything was taken for it.
    """

    running: Sequence[RunningTurn]
    work: Mapping[TurnId, int]
    retracted: Sequence[TurnId]
    is_oldest_short: bool

    @property
    def has_shortage(self) -> bool:
        """Return whether running turns lack pages, so that admission must wait."""
        return bool(self.retracted) or self.is_oldest_short


def claim_pages(
    turns: Sequence[RunningTurn], shares: Mapping[TurnId, int], budget: Budget
) -> RunningClaims:
    """Take pages for the shares of running turns, oldest first; the youngest may be retracted."""
    running, work, retracted = list(turns), dict[TurnId, int](), list[TurnId]()
    is_oldest_short, index = False, 0
    # Not a `for` loop: retraction removes turns behind `index`.
    while index < len(running):
        turn = running[index]
        num_tokens = shares.get(turn.turn_id, 0)
        num_pages = budget.new_pages(num_tokens, turn.num_spare)
        if num_tokens > 0 and not budget.has_pages(num_pages):
            lost = [other.turn_id for other in _reclaim(running, index, num_pages, budget)]
            retracted += lost
            if lost:
                gone = set(lost)
                running = [other for other in running if other.turn_id not in gone]
        if num_tokens > 0 and budget.has_pages(num_pages):
            budget.grow(num_pages)
            work[turn.turn_id] = num_tokens
            if turn.num_uncomputed > 1:  # decode tokens come on top of the budget
                budget.num_tokens -= num_tokens
        elif num_tokens > 0 and index == 0:
            is_oldest_short = True
        index += 1
    return RunningClaims(running, work, retracted, is_oldest_short)


def _reclaim(
    running: Sequence[RunningTurn], index: int, num_pages: int, budget: Budget
) -> Sequence[RunningTurn]:
    """Cool idle sessions and retract younger turns until every pool has `num_pages`.

    For any turn but the oldest: all that it takes, or nothing.

    Returns:
        The retracted turns, youngest first.
    """
    is_oldest = index == 0
    shortage = Shortage(budget.pages, (num_pages,) * len(budget.pages))
    younger = running[:index:-1]
    if not is_oldest:
        # Compare with the totals first: asking every session in vain, in every step, would cost a
        # step O(idle sessions).
        idle = budget.idle.remaining()
        pages = add_pages(idle.freed_pages, (turn.held_pages for turn in younger))
        if not shortage.can_be_met(idle.num_sessions + len(younger), pages):
            return ()
    budget.idle.ask(shortage)
    if shortage and not budget.idle.may_ask(shortage):
        budget.cool(shortage.cooled)  # the next plan cools others; nobody is retracted before
        return ()
    retracted = [t for t in younger if shortage and shortage.ask_pages(t.held_pages)]
    cooled = shortage.cooled
    if not shortage:
        budget.idle.put_back(shortage.skipped)
    elif not is_oldest:
        # The totals counted more than was given. Take nothing: this turn waits for older ones.
        budget.idle.put_back(shortage.asked)
        return ()
    else:
        # All others wait for the oldest turn. Sessions that share pages report none of them, so
        # take everything, although the count says that it is not enough: it may free more than
        # was counted, and the next plan sees that.
        cooled, retracted = shortage.asked[:MAX_COOLED], list(younger)
    budget.cool(cooled)
    budget.retract(retracted)
    return retracted
