"""What the next forward computes, and who gives up pages for it: a pure function.

State in, plan out: no clock, no allocator, no randomness, no logging. The view is read-only and
not a copy; tests pass frozen fakes.

There is no prefill phase and no decode phase: a turn has positions that are not computed yet, and
the plan gives each turn a number of them (as vLLM v1 does). A decoding turn, which lacks a single
position, always gets it, so a long prefill never stalls a stream. `plan_tokens` splits the token
budget among prefill chunks, `plan_running` finds pages for running turns, `plan_admission` admits
waiting turns, and `plan_budget` keeps what is left.

A worked example, run by a test with the frozen fakes of `tests/engine/plan_views.py`. A page holds
4 positions, and a forward computes 16 prefill tokens. `chat` decodes and begins a new page, `essay`
prefills 40 tokens into pages that it has, `new` waits with a prompt of 5. With 9 pages free all
three are in the forward: `chat` gets 1 token, `new` its whole prompt, `essay` the rest.

>>> chat, essay = running("chat", 1), running("essay", 40, spare=40, held=10)
>>> new, idle = waiting("new", 5), FakeIdle("old session", freed_pages=(2,))
>>> view = FakeView(running=(chat, essay), waiting=(new,), headroom_pages=(9,))
>>> work_of(plan_step(view, LIMITS))
{'chat': 1, 'essay': 11, 'new': 5}

With one page free, `chat` takes it, and the two pages for `new` come from an idle session. Without
an idle session `new` waits: admission never retracts a running turn. `essay` gets its tokens.

>>> tight = replace(view, headroom_pages=(1,))
>>> plan_step(replace(tight, idle_sessions=(idle,)), LIMITS).cool
('old session',)
>>> plan = plan_step(tight, LIMITS)
>>> plan.blocked, work_of(plan)
(('new', <BlockReason.PAGES: 'pages'>), {'chat': 1, 'essay': 16})

With no page free, the oldest turn goes on at the expense of the youngest, which is retracted.

>>> plan = plan_step(replace(tight, headroom_pages=(0,)), LIMITS)
>>> plan.retract, plan.admit, work_of(plan)
(('essay',), (), {'chat': 1})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from cache.types import SessionId, TurnId
from session_server.engine.plan_admission import AdmissionPass
from session_server.engine.plan_budget import Budget
from session_server.engine.plan_running import claim_pages
from session_server.engine.plan_tokens import Candidate, price_waiting, share_tokens
from session_server.engine.scheduler_view import (
    BlockReason,
    Limits,
    Load,
    RunningTurn,
    SchedulerView,
)


class Work(msgspec.Struct, frozen=True, gc=False):
    """Compute `num_tokens` further positions of one turn, and verify `num_drafts` behind them."""

    turn_id: TurnId
    num_tokens: int
    num_drafts: int = 0


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """Hold what `Scheduler.apply` carries out, in order: cool, retract, admit, work; `Engine` ends
    `refuse`.

    Attributes:
        cool: idle sessions that lose their KV.
        retract: running turns that give their KV back (whole pages stay in the tree, evictable)
            and wait again, youngest first.
        admit: waiting turns that start to run. They also appear in `work`.
        work: what each turn computes.
        refuse: a turn that must end, or all would wait forever: nothing runs, nothing more can be
            cooled, and it still lacks pages.
        blocked: the first turn left waiting, and why.
        num_bypasses: how many of `admit` bypassed it.
        is_denial: no waiting turn can be admitted before pages, rows or places come back, and this
            plan found that out. See `SchedulerView.known_denial`.
        load: what the next plan has to know where there are sessions of several tenants.
    """

    cool: tuple[SessionId, ...]
    retract: tuple[TurnId, ...]
    admit: tuple[TurnId, ...]
    work: tuple[Work, ...]
    refuse: TurnId | None
    blocked: tuple[TurnId, BlockReason] | None
    num_bypasses: int = 0
    is_denial: bool = False
    load: Load = Load()

    @property
    def is_empty(self) -> bool:
        """Return whether applying it changes nothing, not even for whom the next one looks."""
        is_idle = not (self.cool or self.retract or self.work or self.refuse)
        return is_idle and not self.load.has_postponed


def plan_step(view: SchedulerView, limits: Limits) -> StepPlan:
    """Decide what one forward computes and who gives up pages for it.

    Running turns go first, oldest first. They may take pages from idle sessions, then from the
    youngest running turn. Waiting turns take what is left, in order. They may cool idle sessions
    too, but admission never causes a retraction. Turns that this forward brings to their next token
    may bypass a blocked turn; one that waits for pages is bypassed `MAX_BYPASSES` times at most.

    A turn takes as many new pages in every pool. A pool that is short asks only those that hold
    pages of that pool.

    A turn that cannot get enough pages takes none, except the oldest, on whose progress all others
    depend; no other turn gets what was taken for it. Cooling sessions that share a prefix may free
    more than was counted, so the oldest turn may need a few steps to proceed.
    """
    running = view.running
    prefilling = [turn for turn in running if turn.num_uncomputed > 1]
    # A prefill takes another share in every forward, so an earlier denial says nothing beside one.
    known_denial = None if prefilling else view.known_denial
    candidates = list(price_waiting(view, running, limits)) if known_denial is None else []
    shares = share_tokens(running, prefilling, candidates, limits, view=view)

    budget = Budget(view, limits, shares.num_tokens)
    claims = claim_pages(running, shares.tokens, budget)
    admission = AdmissionPass(
        claims, shares.tokens, budget, limits=limits, is_shared=view.is_shared
    )
    if known_denial is None:
        admission.admit(candidates, view.waiting)
    else:
        admission.deny(known_denial)

    work = {**claims.work, **admission.work}
    _top_up(claims.running, candidates, work, budget)
    drafts = _offer_drafts(claims.running, work, budget)

    assert min(budget.pages) >= 0, "a plan must not overdraw its headroom"
    assert budget.num_tokens >= 0
    assert not work.keys() & set(claims.retracted)
    is_unchanged = not (budget.idle.cooled or claims.retracted or admission.work)
    has_postponed = shares.load.has_postponed
    is_stuck = is_unchanged and not (work or has_postponed or view.is_in_flight)
    return StepPlan(
        cool=tuple(budget.idle.cooled),
        retract=tuple(claims.retracted),
        admit=tuple(admission.work),
        work=tuple(Work(t, n, drafts.get(t, 0)) for t, n in work.items()),
        refuse=_turn_to_refuse(claims.running, admission.blocked) if is_stuck else None,
        blocked=admission.blocked,
        num_bypasses=admission.num_bypasses,
        is_denial=is_unchanged
        and not (prefilling or known_denial or has_postponed)
        and _waits_for_pages(admission.blocked),
        load=shares.load,
    )


def _top_up(
    running: Sequence[RunningTurn],
    candidates: Sequence[Candidate],
    work: dict[TurnId, int],
    budget: Budget,
) -> None:
    """Give prefills and admitted turns tokens that no admission used."""
    for turn in running:
        num_tokens = work.get(turn.turn_id, 0)
        num_extra = min(turn.num_uncomputed - num_tokens, budget.num_tokens)
        if turn.num_uncomputed == 1 or num_extra == 0:
            continue
        held_pages = budget.new_pages(num_tokens, turn.num_spare)
        # As far as free pages hold them.
        num_pages = budget.new_pages(num_tokens + num_extra, turn.num_spare) - held_pages
        if budget.has_pages(num_pages):
            budget.grow(num_pages)
            budget.num_tokens -= num_extra
            work[turn.turn_id] = num_tokens + num_extra
    for candidate in candidates:
        turn_id = candidate.turn.turn_id
        if turn_id in work:
            # Admission took pages for all it lacks.
            num_missing = candidate.quote.num_uncomputed - work[turn_id]
            num_extra = min(num_missing, budget.num_tokens)
            work[turn_id] += num_extra
            budget.num_tokens -= num_extra


def _offer_drafts(
    running: Sequence[RunningTurn], work: Mapping[TurnId, int], budget: Budget
) -> dict[TurnId, int]:
    """Return the drafts of each turn. They only use spare tokens and free pages."""
    drafts: dict[TurnId, int] = {}
    for turn in running:
        if turn.num_drafts == 0 or turn.turn_id not in work:
            continue
        num_drafts = min(turn.num_drafts, budget.num_tokens)
        # A turn with drafts decodes, so it has claimed the pages of one position already.
        num_pages = budget.new_pages(1 + num_drafts, turn.num_spare)
        num_pages -= budget.new_pages(1, turn.num_spare)
        if not budget.has_pages(num_pages):
            # Shorten them to what its last page still takes behind that position.
            num_drafts, num_pages = min(num_drafts, max(0, turn.num_spare - 1)), 0
        if num_drafts > 0:
            budget.grow(num_pages)
            budget.num_tokens -= num_drafts
            drafts[turn.turn_id] = num_drafts
    return drafts


def _turn_to_refuse(
    running: Sequence[RunningTurn], blocked: tuple[TurnId, BlockReason] | None
) -> TurnId | None:
    """Return the turn to end when no turn can proceed: the oldest has had every page by now."""
    if running:
        return running[0].turn_id
    return blocked[0] if blocked else None


def _waits_for_pages(blocked: tuple[TurnId, BlockReason] | None) -> bool:
    return blocked is not None and blocked[1] is BlockReason.PAGES
