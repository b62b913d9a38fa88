"""Admission: which waiting turns start to run, and which may bypass the first that cannot."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, assert_never

from cache.types import TurnId
from session_server.engine.plan_budget import MAX_COOLED, Budget
from session_server.engine.plan_running import RunningClaims
from session_server.engine.plan_tokens import Candidate
from session_server.engine.scheduler_view import BlockReason, Limits, WaitingTurn
from session_server.engine.shortage import PoolPages, Shortage, add_pages, subtract_pages

MAX_BYPASSES: Final = 64
"""How many shorter turns, or turns of other tenants, may bypass a turn that waits for pages."""

KEPT_PLACES: Final = 8
"""One of so many places is kept for tenants that have few: a tenant leaves as many free as it has
turns running, up to that part, so that nobody who asks for little waits for a place."""


class AdmissionPass:
    """Admit waiting turns in one pass, in order.

    Attributes:
        work: tokens of the admitted turns, in order of admission.
        blocked: the first turn that cannot be admitted, and why.
        num_bypasses: admitted turns that bypassed `blocked`.
    """

    def __init__(
        self,
        claims: RunningClaims,
        shares: Mapping[TurnId, int],
        budget: Budget,
        *,
        limits: Limits,
        is_shared: bool = False,
    ) -> None:
        """Begin. `is_shared`: there are sessions of several tenants."""
        self._claims = claims
        self._shares = shares
        self._budget = budget
        self._limits = limits
        self._is_shared = is_shared
        self._num_kept = limits.num_turns // KEPT_PLACES if is_shared else 0
        self._num_running = Counter(turn.tenant for turn in claims.running)
        self._denied: set[str] = set()
        self.work: dict[TurnId, int] = {}
        self.blocked: tuple[TurnId, BlockReason] | None = None
        self.num_bypasses = 0
        self._blocked_tenant = ""

    def deny(self, blocked: tuple[TurnId, BlockReason]) -> None:
        """Admit no turn, for a reason that an earlier plan found."""
        turn_id, reason = blocked
        self.blocked = turn_id, BlockReason.SHORTAGE if self._claims.has_shortage else reason

    def admit(self, candidates: Sequence[Candidate], waiting: Iterable[WaitingTurn]) -> None:
        """Admit candidates, the first of `waiting`, in order; behind a blocked one only some."""
        max_bypasses = 0
        for candidate in candidates:
            if self.blocked is None:
                reason = self._try_admit(candidate)
                if reason is not None:
                    self.blocked = candidate.turn.turn_id, reason
                    self._blocked_tenant = candidate.turn.tenant
                    max_bypasses = self._max_bypasses(candidate.turn, reason, len(candidates))
            elif max_bypasses > self.num_bypasses and self._may_bypass(candidate):
                reason = self._try_admit(candidate)
                self.num_bypasses += reason is None
                if reason is BlockReason.PAGES:
                    # The tenant's next one would ask idle sessions in vain too: that is expensive.
                    self._denied.add(candidate.turn.tenant)
        if self.blocked is None:
            self._block_first_unpriced(itertools.islice(waiting, len(candidates), None))

    def _block_first_unpriced(self, rest: Iterator[WaitingTurn]) -> None:
        """Report the first turn behind the candidates: it lacks a place, or else tokens."""
        turn = next(rest, None)
        if turn is not None:
            is_full = self._num_free_places() == 0
            self.blocked = turn.turn_id, BlockReason.TURNS if is_full else BlockReason.TOKENS

    def _num_free_places(self) -> int:
        return self._limits.num_turns - len(self._claims.running) - len(self.work)

    def _has_running(self) -> bool:
        return bool(self._claims.running or self.work)

    def _may_bypass(self, candidate: Candidate) -> bool:
        """Return whether a candidate may be admitted before the blocked turn.

        A turn that waits for tokens loses nothing. One that waits for pages is bypassed only by
        turns that this forward brings to their next token: they are soon idle, and then their pages
        can be taken back. Turns of other tenants do not wait for the memory of this one, nor for
        its places.
        """
        assert self.blocked is not None
        _, reason = self.blocked
        if candidate.turn.tenant in self._denied:
            return False
        if candidate.turn.tenant != self._blocked_tenant:
            return True
        if reason is BlockReason.TURNS:
            return False
        return reason is BlockReason.TOKENS or candidate.reaches_token(self._shares)

    def _max_bypasses(self, turn: WaitingTurn, reason: BlockReason, num_candidates: int) -> int:
        """Return how many may bypass a turn that is blocked."""
        match reason:
            case BlockReason.TOKENS:
                return num_candidates  # no bound: the next forwards bring it tokens
            case BlockReason.PAGES if self._has_running():
                # Bounded, since whoever bypasses it may take the pages that it waits for.
                return max(0, MAX_BYPASSES - turn.times_bypassed)
            case BlockReason.TURNS if self._num_free_places() > 0:
                return num_candidates  # places that its tenant leaves to others
            case BlockReason.PAGES | BlockReason.TURNS | BlockReason.SHORTAGE:
                # Without a running turn no pages come back, so this turn must come first, or be
                # refused. A lack of places, or of pages for running turns, blocks every turn.
                return 0
            case _:
                assert_never(reason)

    def _try_admit(self, candidate: Candidate) -> BlockReason | None:
        """Admit a candidate and take its tokens, pages and row, or return why not."""
        turn, quote, budget = candidate.turn, candidate.quote, self._budget
        # What was taken for running turns must not go to a newcomer: they would be short again.
        if self._claims.has_shortage:
            return BlockReason.SHORTAGE
        # This plan cools its own session, which makes the quote void, or as many as it may.
        if turn.session_id in budget.idle.cooled or len(budget.idle.cooled) >= MAX_COOLED:
            return BlockReason.PAGES
        num_kept = min(self._num_running[turn.tenant], self._num_kept)
        if self._num_free_places() <= num_kept:
            return BlockReason.TURNS
        num_tokens = min(self._shares.get(turn.turn_id, 0), budget.num_tokens)
        if num_tokens == 0:
            return BlockReason.TOKENS
        # Reserve the whole context, and what running prefills still take, or two long prompts
        # would retract each other in turns. A turn that one forward brings to its first token may
        # borrow what is promised to prefills: it is soon idle and can then be cooled.
        needed = quote.context_pages
        if quote.num_uncomputed > self._limits.num_tokens:
            needed = add_pages(needed, self._promised_pages())
        if self._is_shared and self._has_running():
            needed = add_pages(needed, [turn.reserved_pages])
        if not self._reclaim(candidate, needed):
            return BlockReason.PAGES
        if quote.own_pages is not None:
            budget.idle.keep(turn.session_id, quote.own_pages)
        budget.take(quote.context_pages)
        budget.num_rows -= quote.needs_row
        budget.num_tokens -= num_tokens
        self.work[turn.turn_id] = num_tokens
        self._num_running[turn.tenant] += 1
        return None

    def _promised_pages(self) -> Iterator[PoolPages]:
        """Yield the pages that each running prefill still takes after this forward."""
        for turn in self._claims.running:
            if turn.num_uncomputed > 1:
                num_tokens = self._claims.work.get(turn.turn_id, 0)
                claimed = self._budget.new_pages(num_tokens, turn.num_spare)
                yield tuple(max(0, num_pages - claimed) for num_pages in turn.promised_pages)

    def _reclaim(self, candidate: Candidate, needed: PoolPages) -> bool:
        """Cool idle sessions for `needed` pages and a row, and return whether there are enough.

        If there are not, cool none, unless nothing runs. If that takes more than this plan may
        cool, the turn waits: the next plan asks for it first again, and has what these freed.
        """
        quote, budget = candidate.quote, self._budget
        shortage = Shortage(budget.pages, needed, quote.needs_row - budget.num_rows)
        if shortage and self._has_running():
            # Compare with the totals first: asking every session in vain, in every step, would cost
            # a step O(idle sessions).
            idle = budget.idle.remaining()
            num_sessions, pages = idle.num_sessions, idle.freed_pages
            if quote.own_pages is not None:
                num_sessions, pages = num_sessions - 1, subtract_pages(pages, quote.own_pages)
            if not shortage.can_be_met(num_sessions, pages):
                return False
        own_session = budget.idle.ask(shortage, candidate.turn.session_id)
        if not shortage:
            budget.idle.put_back(shortage.skipped)
            budget.cool(shortage.cooled)
            return True
        if not budget.idle.may_ask(shortage):
            budget.cool(shortage.cooled)
            return False
        asked = shortage.asked
        if own_session is not None:
            # A turn that rewinds its session needs less than the session holds. Once that is cold,
            # the next plan prices the turn without the pages that the rewind drops.
            asked.append(own_session)
        if self._has_running():
            budget.idle.put_back(asked)
        else:
            # No running turn will give pages back. Sessions that share pages report none of them,
            # so cool them: it may free more than was counted, and the next plan sees that.
            budget.cool(asked[:MAX_COOLED])
        return False
