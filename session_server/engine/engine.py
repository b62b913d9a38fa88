"""`Engine`: one step is settle, handle commands, plan, apply. It does no IO.

`Engine.step` knows no clock, thread, socket, randomness or device. Time, commands and results come
in; events and at most one batch go out; equal inputs give equal outputs. The same class serves,
runs in the simulator and replays a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from cache.errors import AuditFailed
from cache.session_cache import SessionAwareCache
from cache.types import TurnId
from session_server.core.batch import (
    Batch,
    CompileRequest,
    CompileResult,
    Probe,
    StepResult,
)
from session_server.core.commands import EngineCommand, ReportMemory
from session_server.core.errors import ServerBusy, SessionServerError
from session_server.core.events import EngineEvent
from session_server.core.tier_orders import TierOrder, TierResult
from session_server.engine.command_handler import CommandHandler
from session_server.engine.config import EngineConfig
from session_server.engine.context import EngineContext
from session_server.engine.drafting import Drafting
from session_server.engine.guard import MemoryGuard
from session_server.engine.in_flight import InFlight
from session_server.engine.input_drafts import InputDrafts
from session_server.engine.memory import MemoryWatch
from session_server.engine.plan import StepPlan, plan_step
from session_server.engine.reporting import Reporter
from session_server.engine.scheduler import Applied, Scheduler
from session_server.engine.scheduler_view import Limits
from session_server.engine.settle import Settler
from session_server.engine.shares import share_len
from session_server.engine.tiers.tiers import Tiers
from session_server.engine.turn_queue import WaitingQueue
from session_server.engine.view import LiveView


class StepOutcome(msgspec.Struct, frozen=True, gc=False):
    """Hold what one step gave.

    `batch` must be launched, in the order of the steps. `is_blocked`: another step changes nothing
    until a command or a result arrives. `to_compile`: each is answered by a `CompileResult`.
    `orders`: each but `Forget` is answered by a `TierResult`.
    """

    events: list[EngineEvent]
    batch: Batch | None
    is_blocked: bool
    to_compile: tuple[CompileRequest, ...] = ()
    orders: tuple[TierOrder, ...] = ()


class _Next(NamedTuple):
    """Hold what a step plans. `has_waited`: a plan came to nothing until a copy of KV ends."""

    plan: StepPlan | None = None
    batch: Batch | None = None
    has_waited: bool = False

    @property
    def may_do_more(self) -> bool:
        """Return whether another step may do something that this one has not."""
        is_done = self.plan is None or self.plan.is_empty or self.has_waited
        return self.batch is not None or not is_done


class EngineParts(NamedTuple):
    """Name the parts of an engine, for tests that check it from outside."""

    cache: SessionAwareCache
    scheduler: Scheduler
    settler: Settler
    in_flight: InFlight
    watch: MemoryWatch
    guard: MemoryGuard
    tiers: Tiers


class Engine:
    """Run all turns of one device, one step at a time."""

    def __init__(
        self,
        cache: SessionAwareCache,
        config: EngineConfig,
        *,
        stopwatch: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Put the parts together around a cache, which only the engine changes.

        `stopwatch` returns seconds, to report how long memory checks take; no decision depends on
        it.
        """
        self._cache = cache
        self._limits = Limits(
            num_tokens=config.chunk_tokens,
            num_turns=config.max_running,
            page_size=cache.spec.page_size,
        )
        self._in_flight = InFlight(config.num_in_flight)
        tiers = Tiers(cache, config.tiers, self._in_flight)
        watch = MemoryWatch(cache, config.memory, stopwatch)
        context = EngineContext(config, cache, watch, self._in_flight, tiers)
        self._context, self.counters = context, context.counters
        self._drafting = Drafting(cache, config.speculation)
        self._scheduler = Scheduler(context)
        self._input_drafts = InputDrafts(context)
        self._settler = Settler(context, self._scheduler, self._input_drafts)
        self._guard = MemoryGuard(context, self._scheduler, settler=self._settler)
        self._reporter = Reporter(context, self._scheduler)
        self._command_handler = CommandHandler(
            context,
            self._scheduler,
            settler=self._settler,
            guard=self._guard,
            input_drafts=self._input_drafts,
        )

    @property
    def max_turn_len(self) -> int:
        """Return the tokens of the longest context that a turn may reach; see `TurnLimits`."""
        return self._scheduler.turn_limits.max_turn_len

    @property
    def has_shut_down(self) -> bool:
        """Return whether `Shutdown` was handled, every forward is settled, and what is worth it was
        written to disk."""
        is_over = self._command_handler.is_shutting_down and not self._in_flight
        return is_over and not self._context.tiers.is_draining

    @property
    def is_at_rest(self) -> bool:
        """Return whether the engine has no turn, no draft to compute and no forward in flight."""
        return not (self._scheduler or self._in_flight or self._input_drafts)

    @property
    def due_s(self) -> float | None:
        """Return the time from which on a step does something though nothing has come; None for
        never."""
        return self._context.tiers.due_s

    @property
    def is_audit_due(self) -> bool:
        """Return whether a full audit should begin or is under way; see `MemoryWatch`."""
        return self._context.watch.is_audit_due

    def step(
        self,
        now_s: float,
        commands: Sequence[EngineCommand],
        results: Sequence[StepResult],
        compiled: Sequence[CompileResult] = (),
        *,
        copied: Sequence[TierResult] = (),
    ) -> StepOutcome:
        """Settle results, in launch order, handle commands, then plan the next forward.

        `now_s`: seconds of any monotonic clock. `copied`: results of orders, in any order.

        Raises:
            AuditFailed: the books are wrong, and `MemoryCheck.STRICT` is set or they cannot be
                repaired.
        """
        self._context.watch.trace.begin_step(now_s, commands, results)
        for result in results:
            self._settle(result, now_s)
        self._take_copied(copied, now_s)
        for command in commands:
            self._handle(command, now_s)
        for grammar in compiled:
            self._take_grammar(grammar)
        self._begin_copies()
        to_compile = self._scheduler.compiling.requests(is_shared=self._cache.num_tenants > 1)
        planned = self._next_batch(now_s)
        plan, batch = planned.plan, planned.batch
        has_repaired = self._guard.end_step(plan, batch)
        orders = self._context.tiers.take_orders(now_s)
        is_asked = any(isinstance(command, ReportMemory) for command in commands)
        self._reporter.report(now_s, has_worked=bool(results or batch), is_asked=is_asked)
        # Drafts that found no page have ended; the next step tries those behind them.
        has_drafts = bool(self._input_drafts) and not (self._scheduler or self._in_flight)
        has_more = self._context.tiers.has_more or has_repaired or has_drafts
        is_blocked = self._in_flight.is_full or not (has_more or planned.may_do_more)
        events = self._context.outbox.take_events()
        return StepOutcome(events, batch, is_blocked, to_compile, tuple(orders))

    def audit_slice(self) -> bool:
        """Recount a part of the memory, between any two steps, while `is_audit_due`.

        Returns:
            Whether the audit is complete. The next step acts on what it found, and asks for a
            probe.
        """
        is_complete = self._context.watch.audit_slice()
        if is_complete:
            self._guard.prober.request()
        return is_complete

    def inspect(self) -> EngineParts:
        """Return the parts of this engine, for tests; the server never calls it."""
        return EngineParts(
            self._cache,
            self._scheduler,
            self._settler,
            self._in_flight,
            self._context.watch,
            self._guard,
            self._context.tiers,
        )

    def _settle(self, result: StepResult, now_s: float) -> None:
        batch = self._in_flight.pop()
        try:
            if batch.probe is None:
                self._settler.settle(batch, result, now_s)
            else:
                self._guard.prober.settle(result, now_s)
        except AuditFailed as error:
            self._guard.recover(error)

    def _take_copied(self, copied: Sequence[TierResult], now_s: float) -> None:
        try:
            self._context.tiers.take(copied, now_s)
        except AuditFailed as error:
            self._guard.recover(error)

    def _begin_copies(self) -> None:
        try:
            self._context.tiers.begin_deferred()
        except AuditFailed as error:
            self._guard.recover(error)

    def _handle(self, command: EngineCommand, now_s: float) -> None:
        try:
            self._command_handler.handle(command, now_s)
        except AuditFailed as error:
            self._guard.recover(error)
            # It was carried out in part at most, and a command that comes twice changes nothing.
            self._command_handler.handle(command, now_s)

    def _take_grammar(self, result: CompileResult) -> None:
        turn = self._scheduler.find(result.turn_id)
        if isinstance(result.outcome, SessionServerError):
            if turn is not None:  # else it has ended
                self._settler.fail(turn, result.outcome)
            self._scheduler.compiling.give_up(result.turn_id)
        else:
            self._scheduler.compiled(result.turn_id, result.outcome)

    def _next_batch(self, now_s: float) -> _Next:
        """Return the next plan and the batch made from it; None where there is nothing to do."""
        retry_alone = self._settler.retry_alone
        # A turn that is retried alone starts once no other forward is in flight. In a flood whoever
        # comes waits for a single one.
        must_wait = retry_alone or self._scheduler.waiting.load.is_flood
        is_held = self._in_flight.is_full or (self._in_flight and must_wait)
        if self._command_handler.is_shutting_down or is_held:
            return _Next()
        if not retry_alone and (probe := self._next_probe(now_s)) is not None:
            return _Next(batch=self._in_flight.push((), self._context.outbox.take_changes(), probe))
        if not self._scheduler:
            return _Next(batch=self._next_draft_batch())
        interval = self._context.config.retract_interval
        is_forced = interval > 0 and self._in_flight.num_forwards % interval == 0
        is_any = retry_alone or self._input_drafts or is_forced
        if not is_any and (decoding := self._settler.decoding.launch()) is not None:
            changes = self._context.outbox.take_changes()
            return _Next(batch=self._in_flight.push((), changes, decoding=decoding))
        # For such a turn the planner sees no other: none runs, is admitted or gives up pages.
        running = retry_alone[:1] if retry_alone else self._scheduler.running
        max_turn_pages = self._scheduler.turn_limits.max_turn_pages
        queue = (
            WaitingQueue(self._cache, max_turn_pages) if retry_alone else self._scheduler.waiting
        )
        self._drafting.propose(running)
        if any(turn.is_held_back for turn in running):
            # Wait for the result, so that the next forward has all turns. Two forwards with half
            # of the turns each take nearly twice as long, and those held back would be in every
            # second one only.
            return _Next()
        view = LiveView(self._cache, running, queue, bool(self._in_flight), max_turn_pages)
        plan = plan_step(view, self._limits)
        queue.load = plan.load
        if plan.is_denial and plan.blocked is not None:
            queue.note_denial(plan.blocked, len(running), view.supply)
        if is_forced:
            plan = _force_retraction(plan, [turn.turn_id for turn in running])
        try:
            applied = self._apply(plan, now_s)
            rows = applied.rows
            if not (retry_alone or applied.waits_for_copy):
                rows += self._input_drafts.next_rows(self._num_spare(plan))
        except AuditFailed as error:
            self._guard.recover(error)
            return _Next(plan)
        if not rows:
            return _Next(plan, has_waited=applied.is_idle)
        return _Next(plan, self._in_flight.push(rows, self._context.outbox.take_changes()))

    def _next_draft_batch(self) -> Batch | None:
        """Return a forward of drafts alone, behind which no turn waits for another one."""
        if self._in_flight:
            return None
        try:
            rows = self._input_drafts.next_rows(self._limits.num_tokens)
        except AuditFailed as error:
            self._guard.recover(error)
            return None
        return self._in_flight.push(rows, self._context.outbox.take_changes()) if rows else None

    def _num_spare(self, plan: StepPlan) -> int:
        """Return how many tokens of drafts a forward with turns may have: a share at most, and none
        while a turn waits, or has less than it could because of a flood."""
        if not plan.work or plan.blocked is not None or plan.load.is_flood:
            return 0
        num_left = self._limits.num_tokens - sum(w.num_tokens + w.num_drafts for w in plan.work)
        return max(0, min(share_len(self._limits.num_tokens), num_left))

    def _next_probe(self, now_s: float) -> Probe | None:
        return self._guard.prober.choose(
            now_s, is_working=bool(self._scheduler), num_forwards=self._in_flight.num_forwards
        )

    def _apply(self, plan: StepPlan, now_s: float) -> Applied:
        applied = self._scheduler.apply(plan, now_s)
        for session_id in applied.dropped:
            self._context.watch.touch(session_id)
        for turn, error in applied.refused:
            self._settler.fail(turn, error)
        if plan.refuse is not None:
            if self._cache.copies.num_under_way:
                applied.waits_for_copy = True  # which gives pages back
            else:
                self._end_stuck_turn(plan.refuse)
        return applied

    def _end_stuck_turn(self, turn_id: TurnId) -> None:
        """End or unblock a turn that no plan can fit while nothing else can free pages.

        This happens only when pages are lost to quarantine, or one is kept for a rollback. A turn
        that cannot fit into the pools at all is refused when it is submitted.
        """
        turn = self._scheduler.find(turn_id)
        assert turn is not None
        if turn in self._settler.retry_alone:
            # Alone it cannot take pages of other turns, so it runs with them again.
            self._settler.retry_alone.remove(turn)
            return
        if turn.admission is not None and self._cache.release_rollback_page(turn_id):
            return  # the page was kept for a rollback only; it may be the one that is missing
        error = ServerBusy("the memory that is left cannot hold this turn")
        self._settler.fail(turn, error)


def _force_retraction(plan: StepPlan, running: Sequence[TurnId]) -> StepPlan:
    """Return `plan` with the youngest of the `running` turns retracted, for tests.

    Without this a turn is retracted only when pages are short. Returns `plan` itself where that
    turn runs alone or is the only one with work, because the oldest turn must always go on, and
    where `plan` retracts a turn anyway.
    """
    if len(running) < 2 or plan.retract:
        return plan
    youngest = running[-1]
    work = tuple(work for work in plan.work if work.turn_id != youngest)
    if not work:
        return plan
    return msgspec.structs.replace(plan, retract=(youngest,), work=work)
