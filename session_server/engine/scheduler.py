"""`Scheduler`: the waiting and running turns; it cools, retracts, admits and works as planned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cache.errors import OutOfPages, OutOfRows, PinQuotaExceeded
from cache.types import SessionId, TurnId
from session_server.core.batch import BatchRow, CompiledGrammar
from session_server.core.errors import QuotaExceeded, SessionServerError
from session_server.core.events import SessionCooled, TurnStarted
from session_server.engine.batching import make_row
from session_server.engine.compiling import Compiling
from session_server.engine.context import EngineContext
from session_server.engine.plan import StepPlan
from session_server.engine.scheduler_view import BlockReason
from session_server.engine.tiers.restoring import CopyEnd
from session_server.engine.turn import Turn, TurnState
from session_server.engine.turn_line import TurnQueue
from session_server.engine.turn_queue import WaitingQueue, max_reuse, reusable_len

COMPILED_PER_RUNNING: Final = 2
"""Grammars kept compiled for each turn that may run: its own, and that of one that waits."""


@dataclass(slots=True)
class Applied:
    """Hold what applying a plan gave.

    `dropped`: sessions whose KV was dropped. `refused`: turns that have to end, and why.
    `waits_for_copy`: something that was planned has to wait for a copy of KV. `num_restoring`:
    turns that left the line for one.
    """

    rows: list[BatchRow] = field(default_factory=list)
    dropped: list[SessionId] = field(default_factory=list)
    refused: list[tuple[Turn, SessionServerError]] = field(default_factory=list)
    waits_for_copy: bool = False
    num_restoring: int = 0

    @property
    def is_idle(self) -> bool:
        """Return whether another plan would come to the same, until a copy ends."""
        has_changed = self.rows or self.dropped or self.refused or self.num_restoring
        return self.waits_for_copy and not has_changed


def pin_refusal(error: PinQuotaExceeded) -> QuotaExceeded:
    """Return what a client is told whose session cannot be pinned as it is."""
    advice = "unpin or close one, or have the operator raise --pinned-fraction"
    return QuotaExceeded(f"{error}: {advice}")


class Scheduler:
    """Hold every live turn: `compiling`, then in one of two queues, both in `Turn.order`.

    A session has at most one live turn. `turn_limits`: what the pools allow one turn.
    """

    def __init__(self, context: EngineContext) -> None:
        self._cache, self._outbox, self._tiers = context.cache, context.outbox, context.tiers
        self._counters, self._tallies = context.counters, context.tallies
        self._turns: dict[TurnId, Turn] = {}
        self._of_session: dict[SessionId, Turn] = {}
        self.turn_limits = context.cache.turn_limits(context.config.num_ahead)
        self.waiting = WaitingQueue(context.cache, self.turn_limits.max_turn_pages)
        self.running = TurnQueue()
        self.compiling = Compiling(COMPILED_PER_RUNNING * context.config.max_running)

    def __len__(self) -> int:
        return len(self._turns)

    def find(self, turn_id: TurnId) -> Turn | None:
        """Return a live turn by its id; None if there is none."""
        return self._turns.get(turn_id)

    def find_attempt(self, row: BatchRow) -> Turn | None:
        """Return the turn of a launched row; None if that attempt has ended since."""
        turn = self._turns.get(row.turn_id)
        if turn is None or turn.admission is None:
            return None
        return turn if turn.admission.attempt == row.attempt else None

    def turn_of(self, session_id: SessionId) -> Turn | None:
        """Return the live turn of a session; None if it has none."""
        return self._of_session.get(session_id)

    def submit(self, turn: Turn) -> None:
        """Add a new turn to the waiting ones."""
        assert turn.turn_id not in self._turns
        assert turn.request.session_id not in self._of_session
        self._turns[turn.turn_id] = turn
        self._of_session[turn.request.session_id] = turn
        if turn.is_compiling:
            self.compiling.insert(turn)
        else:
            self._wait(turn)

    def compiled(self, turn_id: TurnId, grammar: CompiledGrammar) -> None:
        """Let a turn wait for admission, now that its grammar was compiled; unless it has ended."""
        turn = self.compiling.complete(turn_id, grammar)
        if turn is not None:
            turn.wait()
            self._wait(turn)

    def remove(self, turn: Turn) -> None:
        """Remove a turn that ends."""
        self.compiling.remove(turn)
        self.waiting.charge_outputs(turn)
        if turn.state is TurnState.RUNNING:
            self._stop(turn)
        elif turn.state is TurnState.WAITING:
            self.waiting.remove(turn)
        del self._turns[turn.turn_id]
        del self._of_session[turn.request.session_id]
        turn.finish()

    def requeue(self, turn: Turn) -> None:
        """Let a running turn wait again after the cache has dropped its KV."""
        self._stop(turn)
        turn.retract()
        self.waiting.insert(turn)
        self._counters.retractions += 1

    def apply(self, plan: StepPlan, now_s: float) -> Applied:
        """Apply a plan: cool, retract, admit, then make rows of its work.

        A plan can promise too much in one way: it may count a page twice, in a session to cool and
        in the match of an admitted turn. That turn then waits for the next plan, which counts the
        page once.
        """
        applied = Applied()
        self._cool(plan.cool, applied)
        may_admit = not applied.waits_for_copy
        for turn_id in plan.retract:
            self._retract(self._turns[turn_id], applied)
        admitted = frozenset(plan.admit)
        for work in plan.work:
            turn = self._turns[work.turn_id]
            num_tokens = work.num_tokens
            if turn.turn_id in admitted:
                # What a session holds that is copied first was promised to these.
                if not may_admit or not self._admit(turn, now_s, applied):
                    continue
                # Its match may have grown since it was priced: another turn has published pages.
                num_tokens = min(num_tokens, turn.num_uncomputed)
            end = turn.current_admission.launched_len + num_tokens
            if self._grow(turn, end + work.num_drafts, work.num_drafts):
                grammar = self.compiling.of(turn)
                row = make_row(self._cache, turn, num_tokens, work.num_drafts, grammar=grammar)
                applied.rows.append(row)
            elif turn.turn_id in admitted:
                # Without pages it would hold a row and lock its match for nothing. A turn that ran
                # before keeps its lease and waits for the next plan.
                self._retract(turn, applied)
        if plan.blocked is not None and plan.blocked[1] is BlockReason.PAGES:
            self._turns[plan.blocked[0]].clock.times_bypassed += plan.num_bypasses
        return applied

    def _stop(self, turn: Turn) -> None:
        """Let a turn run no longer: if it is admitted again, its row's sampler starts anew."""
        self.running.remove(turn)
        self._outbox.end(turn.current_admission.loan.row)

    def _wait(self, turn: Turn) -> None:
        """Let a turn wait for admission, or first for its session's KV."""
        self.waiting.insert(turn)
        self._restore(turn, is_ahead=True)

    def _restore(self, turn: Turn, *, is_ahead: bool) -> bool:
        """Let a waiting turn wait for its session's KV first; return whether it does."""
        if turn.is_restored:
            return False
        request = turn.request
        if not self._tiers.may_restore(request.session_id):
            return False
        history = self._cache.tokens(request.session_id, 0, request.base_len)
        tokens = np.concatenate((history, turn.uncommitted_tokens()))[: reusable_len(turn)]

        def resume(end: CopyEnd) -> None:
            if turn.state is TurnState.RESTORING:
                turn.resume(is_restored=end == "over")
                self.waiting.insert(turn)

        if not self._tiers.restore(request.session_id, tokens, resume, is_ahead=is_ahead):
            return False
        self.waiting.remove(turn)
        turn.restore()
        return True

    def _cool(self, session_ids: Iterable[SessionId], applied: Applied) -> None:
        """Cool sessions, but not one that has to be copied first."""
        for session_id in session_ids:
            if self._tiers.holds(session_id):
                applied.waits_for_copy = True
                continue
            self._tiers.note_turn(session_id)
            self._cache.cool(session_id)
            self._counters.coolings += 1
            self._outbox.emit(SessionCooled(session_id=session_id))
            applied.dropped.append(session_id)

    def _retract(self, turn: Turn, applied: Applied) -> None:
        uncommitted = self._cache.retract(turn.turn_id)
        assert len(uncommitted) == turn.known_len - turn.request.base_len
        self.requeue(turn)
        applied.dropped.append(turn.request.session_id)

    def _grow(self, turn: Turn, to_len: int, num_drafts: int) -> bool:
        try:
            self._outbox.write(self._cache.grow(turn.turn_id, to_len, num_drafts))
        except OutOfPages:
            self._counters.shortfalls += 1
            return False
        return True

    def _admit(self, turn: Turn, now_s: float, applied: Applied) -> bool:
        if self._restore(turn, is_ahead=False):
            applied.waits_for_copy = True
            applied.num_restoring += 1
            return False
        request = turn.request
        cut = self._tiers.cut_by(request.session_id, request.base_len)
        try:
            loan = self._cache.begin_turn(
                request.session_id,
                request.turn_id,
                base_len=request.base_len,
                new_tokens=turn.uncommitted_tokens(),
                max_reuse_len=max_reuse(turn),
            )
        except OutOfRows:
            self._counters.shortfalls += 1
            return False
        except PinQuotaExceeded as error:
            applied.refused.append((turn, pin_refusal(error)))
            return False
        self._outbox.write(loan.table_writes)
        self._tiers.note_turn(request.session_id)
        self._tiers.note_cut(request.session_id, cut)
        self.waiting.charge(turn)
        self.waiting.remove(turn)
        turn.admit(loan)
        self.running.insert(turn)
        if turn.clock.admitted_s is None:
            turn.clock.admitted_s = now_s
            self._counters.prompt_tokens += turn.prompt_len
            self._counters.cached_tokens += turn.cached_len
            self._tallies.used_draft_tokens += loan.tail_len
        self._outbox.emit(
            TurnStarted(
                turn_id=turn.turn_id,
                prompt_tokens=turn.prompt_len,
                cached_tokens=turn.cached_len,
                drafted_tokens=loan.tail_len,
            )
        )
        return True
