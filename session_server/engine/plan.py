"""What the next forward computes, and who gives up pages for it: a pure function.

State in, plan out: no clock, no allocator, no randomness, no logging. The view is read-only and
not a copy; tests pass frozen fakes.

There is no prefill and no decode here: a turn has positions that are not computed yet, and the
plan gives each turn a number of them (the phase-free scheduling known from vLLM v1). A turn that
lacks one position always gets it, so a long prompt never stalls those that stream. How longer
needs share the rest is `shares.py`: long prompts do not hold up others' first tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, assert_never

import msgspec

from cache.types import SessionId, TurnId, pages_for
from session_server.engine.scheduler_view import (
    AdmissionQuote,
    BlockReason,
    RunningTurn,
    SchedulerView,
    WaitingTurn,
)
from session_server.engine.shares import fair_shares, share_len
from session_server.engine.shortage import (
    IdleSession,
    PoolPages,
    Shortage,
    less,
    total,
)

MAX_OVERTAKINGS: Final = 64
"""Short turns that may pass a turn that waits for pages, before nobody does."""


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Bounds of one forward: `num_tokens` of long needs, `num_turns` running at a time."""

    num_tokens: int
    num_turns: int
    page_size: int


class Work(msgspec.Struct, frozen=True, gc=False):
    """`num_tokens` further positions of one turn, and `num_drafts` guesses behind them."""

    turn_id: TurnId
    num_tokens: int
    num_drafts: int = 0


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """Carried out in this order: cool, retract, admit, work.

    `admit` names waiting turns that also appear in `work`. `refuse`: a turn that cannot proceed
    although nothing runs and nothing more can be taken; it must end, or all would wait for ever.
    `blocked`: the first turn left waiting, and why. `num_overtakings`: how many of `admit` passed
    it. `is_denial`: nobody of the line can come before something is given back, as was found out
    now; see `SchedulerView.known_denial`.
    """

    cool: tuple[SessionId, ...]
    retract: tuple[TurnId, ...]
    admit: tuple[TurnId, ...]
    work: tuple[Work, ...]
    refuse: TurnId | None
    blocked: tuple[TurnId, BlockReason] | None
    num_overtakings: int = 0
    is_denial: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether carrying it out changes nothing."""
        return not (self.cool or self.retract or self.work or self.refuse)


def plan_step(view: SchedulerView, limits: Limits) -> StepPlan:
    """Decide what one forward computes and who gives up pages for it.

    Running turns go first, oldest first; they may take pages from idle sessions and then from
    the youngest running turn. Waiting turns take what is left, in order, and may cool idle
    sessions too, but admission never causes a retraction. Turns that this forward brings to their
    next token may pass one that cannot come yet; one that waits for pages they pass only so often.

    Whoever goes on takes as many new pages of every pool. What is short in one is asked of those
    who have pages of that one.

    Nothing is taken in vain: who cannot get enough takes nothing, except the one turn whose
    progress everybody's depends on, and nobody else is given what was taken for it. Cooling
    sessions that share a prefix may free more than was counted, so that turn's progress is promised
    within a few steps, not in the same one.
    """
    planner = _Planner(view, limits)
    planner.share_tokens()
    planner.claim_for_running()
    planner.admit_waiting()
    planner.top_up()
    planner.offer_drafts()
    return planner.finish()


class _Candidate(msgspec.Struct, frozen=True, gc=False):
    turn: WaitingTurn
    quote: AdmissionQuote


class _Planner:
    """One plan in the making."""

    def __init__(self, view: SchedulerView, limits: Limits) -> None:
        self._view = view
        self._limits = limits
        self._running = list(view.running)
        self._idle = view.idle
        self._pages = view.headroom_pages
        self._rows = view.num_free_rows
        self._tokens = limits.num_tokens
        self._shares: dict[TurnId, int] = {}
        self._candidates: list[_Candidate] = []
        self._work: dict[TurnId, int] = {}
        self._drafts: dict[TurnId, int] = {}
        self._plan = _PlanParts(num_pools=len(self._pages))

    def share_tokens(self) -> None:
        """Give every turn its number of tokens, pages aside."""
        long = [t for t in self._running if t.num_uncomputed > 1]
        known = None if long else self._view.known_denial
        if known is None:
            self._candidates = list(self._quoted_candidates())
            self._plan.may_deny = not long
        self._plan.blocked = known
        if self._candidates:
            self._share_with_comers(long)
        elif long:
            self._share(long, ())
        self._shares.update((t.turn_id, 1) for t in self._running if t.num_uncomputed == 1)

    def _share_with_comers(self, long: Sequence[RunningTurn]) -> None:
        self._share(long, self._candidates)
        # Who cannot come for want of a place does not compete for tokens either. Long turns leave
        # half of the places to those that are soon done.
        num_long = sum(self._shares[t.turn_id] < t.num_uncomputed for t in long)
        may_be_long = self._partly_met()[: max(0, max(1, self._limits.num_turns // 2) - num_long)]
        comers = [c for c in self._candidates if self._is_met(c) or c in may_be_long]
        del comers[self._num_free_places() :]
        if len(comers) < len(self._candidates):
            self._share(long, comers)

    def _share(self, long: Sequence[RunningTurn], comers: Sequence[_Candidate]) -> None:
        needs = [t.num_uncomputed for t in long] + [c.quote.num_uncomputed for c in comers]
        # The oldest of each line always has a share, so no line stands still.
        shares = fair_shares(needs, self._tokens, first=(0, len(long)))
        ids = [t.turn_id for t in long] + [c.turn.turn_id for c in comers]
        self._shares = dict(zip(ids, shares, strict=True))

    def _partly_met(self) -> list[_Candidate]:
        """Those that this forward begins and does not finish: the first of the line, then the
        shortest.
        """
        found = [c for c in self._candidates if self._shares[c.turn.turn_id] > 0]
        return sorted(
            (c for c in found if not self._is_met(c)),
            key=lambda c: (c != self._candidates[0], c.quote.num_uncomputed),
        )

    def _is_met(self, candidate: _Candidate) -> bool:
        """Whether this forward brings it to its next token."""
        share = self._shares.get(candidate.turn.turn_id, 0)
        return share == candidate.quote.num_uncomputed

    def claim_for_running(self) -> None:
        """Pages for running turns, oldest first; the youngest may lose theirs."""
        index = 0
        while index < len(self._running):
            turn = self._running[index]
            num_tokens = self._shares.get(turn.turn_id, 0)
            needed = self._new_pages(num_tokens, turn.num_spare)
            if num_tokens > 0 and self._reclaim_for_running(needed, index):
                self._grow(needed)
                self._work[turn.turn_id] = num_tokens
                if turn.num_uncomputed > 1:
                    self._tokens -= num_tokens
            elif num_tokens > 0 and index == 0:
                self._plan.is_oldest_short = True
            index += 1

    def admit_waiting(self) -> None:
        """Waiting turns in order. The first that cannot come stops the line, but for those that
        may pass it.
        """
        plan, num_passes = self._plan, 0
        if plan.blocked is not None and (plan.retract or plan.is_oldest_short):
            plan.blocked = (plan.blocked[0], BlockReason.SHORTAGE)
        for candidate in self._candidates:
            if plan.blocked is None:
                reason = self._try_admit(candidate)
                if reason is not None:
                    plan.blocked = (candidate.turn.turn_id, reason)
                    num_passes = self._num_passes(candidate.turn, reason)
            elif num_passes > plan.num_overtakings and self._may_pass(candidate, plan.blocked[1]):
                reason = self._try_admit(candidate)
                plan.num_overtakings += reason is None
                if reason is BlockReason.PAGES:
                    break  # whoever is next would look for them in vain, and looking is dear
        if plan.blocked is None:
            rest = itertools.islice(self._view.waiting, len(self._candidates), None)
            if (left := next(rest, None)) is not None:
                is_full = self._num_free_places() == 0
                plan.blocked = (
                    left.turn_id,
                    BlockReason.TURNS if is_full else BlockReason.TOKENS,
                )

    def _may_pass(self, candidate: _Candidate, reason: BlockReason) -> bool:
        """Whoever has tokens may pass one that has none; one that waits for pages, only those that
        are soon idle, so that their pages can be taken back.
        """
        return reason is BlockReason.TOKENS or self._is_met(candidate)

    def _num_passes(self, turn: WaitingTurn, reason: BlockReason) -> int:
        """How many may pass a turn that cannot come. Tokens come to it with the next forwards;
        pages do not while others keep taking them, and never by themselves when nothing runs.
        """
        match reason:
            case BlockReason.TOKENS:
                return len(self._candidates)
            case BlockReason.PAGES if self._running or self._work:
                return max(0, MAX_OVERTAKINGS - turn.num_overtakings)
            case BlockReason.PAGES | BlockReason.TURNS | BlockReason.SHORTAGE:
                return 0
            case _:
                assert_never(reason)

    def _num_free_places(self) -> int:
        return self._limits.num_turns - len(self._running) - len(self._plan.admit)

    def top_up(self) -> None:
        """Tokens that those in line could not use go to running turns that need no pages for them
        but free ones, and then to those that were admitted with pages for all they lack.
        """
        for turn in self._running:
            done = self._work.get(turn.turn_id, 0)
            extra = min(turn.num_uncomputed - done, self._tokens)
            if turn.num_uncomputed == 1 or extra <= 0:
                continue
            held = self._new_pages(done, turn.num_spare)
            needed = self._new_pages(done + extra, turn.num_spare) - held
            if needed <= min(self._pages):
                self._grow(needed)
                self._tokens -= extra
                self._work[turn.turn_id] = done + extra
        for candidate in self._candidates:
            turn_id = candidate.turn.turn_id
            if turn_id in self._work:
                extra = candidate.quote.num_uncomputed - self._work[turn_id]
                self._work[turn_id] += min(extra, self._tokens)
                self._tokens -= min(extra, self._tokens)

    def offer_drafts(self) -> None:
        """Guesses, on tokens and pages that are left: none costs anybody anything."""
        for turn in self._running:
            if turn.num_drafts == 0 or turn.turn_id not in self._work:
                continue
            num_drafts = min(turn.num_drafts, self._tokens)
            needed = self._new_pages(1 + num_drafts, turn.num_spare)
            needed -= self._new_pages(1, turn.num_spare)
            if needed > min(self._pages):
                num_drafts, needed = min(num_drafts, max(0, turn.num_spare - 1)), 0
            if num_drafts > 0:
                self._grow(needed)
                self._tokens -= num_drafts
                self._drafts[turn.turn_id] = num_drafts

    def finish(self) -> StepPlan:
        """The plan as a value."""
        parts = self._plan
        assert min(self._pages) >= 0, "a plan must not overdraw its headroom"
        assert self._tokens >= 0
        assert not self._work.keys() & set(parts.retract)
        return StepPlan(
            cool=tuple(parts.cool),
            retract=tuple(parts.retract),
            admit=tuple(parts.admit),
            work=tuple(Work(t, n, self._drafts.get(t, 0)) for t, n in self._work.items()),
            refuse=self._stuck_turn(),
            blocked=parts.blocked,
            num_overtakings=parts.num_overtakings,
            is_denial=self._is_denial(),
        )

    def _is_denial(self) -> bool:
        parts = self._plan
        has_changed = parts.cool or parts.retract or parts.admit
        is_for_pages = parts.blocked is not None and parts.blocked[1] is BlockReason.PAGES
        return parts.may_deny and is_for_pages and not has_changed

    def _quoted_candidates(self) -> Iterator[_Candidate]:
        """As many as this forward could serve: a quote may cost a match of a whole history."""
        if len(self._running) >= self._limits.num_turns:
            return
        short_len, num_short = share_len(self._limits.num_tokens), 0
        for turn in itertools.islice(self._view.waiting, self._limits.num_turns):
            if num_short >= self._limits.num_tokens:
                return
            candidate = _Candidate(turn, turn.quote())
            num_needed = candidate.quote.num_uncomputed
            num_short += num_needed if num_needed <= short_len else 0
            yield candidate

    def _try_admit(self, candidate: _Candidate) -> BlockReason | None:
        turn, quote = candidate.turn, candidate.quote
        if self._plan.retract or self._plan.is_oldest_short:
            return BlockReason.SHORTAGE
        if turn.session_id in self._plan.cool:
            return BlockReason.PAGES  # its quote is void; the next plan prices it anew
        if self._num_free_places() == 0:
            return BlockReason.TURNS
        num_tokens = min(self._shares.get(turn.turn_id, 0), self._tokens)
        if num_tokens == 0:
            return BlockReason.TOKENS
        # Room for the whole context, or two long prompts would evict each other in turns. A
        # turn that one forward can bring to its first token may borrow what is promised to the
        # long ones: it is soon idle, and then its pages can be taken back.
        needed = quote.context_pages
        if quote.num_uncomputed > self._limits.num_tokens:
            needed = total(needed, self._promised_pages())
        if not self._reclaim_for_admission(candidate, needed):
            return BlockReason.PAGES
        self._take(quote.context_pages)
        self._rows -= quote.needs_row
        self._tokens -= num_tokens
        self._work[turn.turn_id] = num_tokens
        self._plan.admit.append(turn.turn_id)
        return None

    def _promised_pages(self) -> Iterator[PoolPages]:
        """Pages that running turns still take for what they know already, after this forward."""
        for turn in self._running:
            if turn.num_uncomputed > 1:
                claimed = self._new_pages(self._work.get(turn.turn_id, 0), turn.num_spare)
                yield tuple(max(0, num_pages - claimed) for num_pages in turn.promised_pages)

    def _reclaim_for_running(self, num_pages: int, index: int) -> bool:
        if num_pages <= min(self._pages):
            return True
        shortage = Shortage(self._pages, (num_pages,) * len(self._pages))
        younger = self._running[:index:-1]
        if index > 0:
            # Asking everybody in vain, in every step, would cost what there are of them.
            num_idle, idle_pages = self._idle_left()
            give = total(idle_pages, (turn.held_pages for turn in younger))
            if not shortage.can_be_met(num_idle + len(younger), give):
                return False
        self._ask_idle(shortage, own=None)
        retracted = [t for t in younger if shortage and shortage.ask_pages(t.held_pages)]
        cooled, is_enough = shortage.cooled, not shortage
        if is_enough:
            self._idle = itertools.chain(shortage.spared, self._idle)
        elif index > 0:
            self._idle = itertools.chain(shortage.asked, self._idle)
            return False
        else:
            # What is shared is reported by nobody: the last resort is to let go of everything.
            cooled, retracted = shortage.asked, younger
        self._cool(cooled)
        self._retract(retracted)
        return is_enough

    def _reclaim_for_admission(self, candidate: _Candidate, needed: PoolPages) -> bool:
        quote, own = candidate.quote, candidate.turn.session_id
        shortage = Shortage(self._pages, needed, quote.needs_row - self._rows)
        if shortage and (self._running or self._work):
            num_idle, idle_pages = self._idle_left()
            if quote.own_pages is not None:
                num_idle, idle_pages = num_idle - 1, less(idle_pages, quote.own_pages)
            if not shortage.can_be_met(num_idle, idle_pages):
                return False
        own_session = self._ask_idle(shortage, own)
        if not shortage:
            self._idle = itertools.chain(shortage.spared, self._idle)
            self._cool(shortage.cooled)
            return True
        asked = shortage.asked
        if own_session is not None:
            # A turn that rewinds its session needs less than it holds. Once cold it is priced
            # anew, without what the rewind lets go.
            asked.append(own_session)
        if self._running or self._work:
            self._idle = itertools.chain(asked, self._idle)
        else:
            self._cool(asked)
        return False

    def _ask_idle(self, shortage: Shortage, own: SessionId | None) -> IdleSession | None:
        """Ask idle sessions until nothing is short; gives the one whose own turn is in need, which
        is not asked."""
        own_session = None
        while shortage and (session := next(self._idle, None)) is not None:
            if session.session_id == own:
                own_session = session
            else:
                shortage.ask(session)
        return own_session

    def _idle_left(self) -> tuple[int, PoolPages]:
        """How many idle sessions are not cooled by this plan yet, and what they would give back."""
        idle = self._view.idle_total
        return idle.num_sessions - len(self._plan.cool), less(
            idle.freed_pages, self._plan.cooled_pages
        )

    def _cool(self, sessions: Sequence[IdleSession]) -> None:
        freed = (session.freed_pages for session in sessions)
        self._plan.cooled_pages = total(self._plan.cooled_pages, freed)
        self._pages = total(self._pages, (session.freed_pages for session in sessions))
        self._rows += len(sessions)
        self._plan.cool += [session.session_id for session in sessions]

    def _retract(self, turns: Sequence[RunningTurn]) -> None:
        """`turns`: youngest first."""
        self._pages = total(self._pages, (turn.held_pages for turn in turns))
        self._rows += len(turns)
        self._plan.retract += [turn.turn_id for turn in turns]
        gone = set(self._plan.retract)
        self._running = [turn for turn in self._running if turn.turn_id not in gone]

    def _grow(self, num_pages: int) -> None:
        if num_pages:
            self._take((num_pages,) * len(self._pages))

    def _take(self, pages: PoolPages) -> None:
        self._pages = tuple(left - num for left, num in zip(self._pages, pages, strict=True))

    def _stuck_turn(self) -> TurnId | None:
        parts = self._plan
        if self._work or parts.cool or parts.retract or self._view.is_in_flight:
            return None
        if self._running:
            return self._running[0].turn_id
        return parts.blocked[0] if parts.blocked else None

    def _new_pages(self, num_tokens: int, num_spare: int) -> int:
        return pages_for(max(0, num_tokens - num_spare), self._limits.page_size)


class _PlanParts:
    def __init__(self, num_pools: int) -> None:
        self.cool: list[SessionId] = []
        self.cooled_pages: PoolPages = (0,) * num_pools
        self.retract: list[TurnId] = []
        self.admit: list[TurnId] = []
        self.is_oldest_short = False
        self.blocked: tuple[TurnId, BlockReason] | None = None
        self.num_overtakings = 0
        self.may_deny = False
