"""`MemoryGuard`: check the books after every step, and repair violations with the least damage.

docs/memory.md has what follows each kind of violation. The repair does not wait for forwards in
flight: the rows of turns that have ended or have another attempt are dropped when they settle, and
what they still write comes before whatever is launched from now on.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import Final

from cache.errors import AuditFailed
from cache.types import SessionId
from cache.views import SlotView
from session_server.core.batch import Batch
from session_server.core.commands import ReportMemory
from session_server.core.errors import InternalInconsistency
from session_server.core.events import CheckerReport, MemoryReported, SessionCooled
from session_server.engine.config import MemoryCheck
from session_server.engine.context import EngineContext
from session_server.engine.memory import MAX_REMEMBERED
from session_server.engine.plan import StepPlan
from session_server.engine.probing import Prober
from session_server.engine.reporting import pool_report, session_pages
from session_server.engine.scheduler import Scheduler
from session_server.engine.settle import Settler
from session_server.engine.turn import TurnState

MAX_REBUILDS: Final = 8
"""After as many rebuilds the next violation ends the engine, and its supervisor decides."""


class MemoryGuard:
    """Check memory at the end of every step, and repair what is found wrong.

    `quarantined`: the sessions last found wrong. `num_rebuilds`: how often the books were rebuilt.
    `num_dropped_tokens`: tokens whose KV both dropped, to be computed again.
    """

    def __init__(self, context: EngineContext, scheduler: Scheduler, *, settler: Settler) -> None:
        self._cache, self._watch = context.cache, context.watch
        self._outbox, self._counters, self._tiers = context.outbox, context.counters, context.tiers
        self._scheduler, self._settler = scheduler, settler
        self.prober = Prober(context.cache, context.watch)
        self.quarantined: deque[SessionId] = deque(maxlen=MAX_REMEMBERED)
        self.num_rebuilds = 0
        self.num_dropped_tokens = 0

    def end_step(self, plan: StepPlan | None, batch: Batch | None) -> bool:
        """End the record of a step, check what the step touched, and repair violations.

        Returns:
            Whether anything was repaired, so that the next plan may find more than the last one.

        Raises:
            AuditFailed: `MemoryCheck.STRICT` is set, or the books cannot be made right.
        """
        watch = self._watch
        if watch.mode is not MemoryCheck.OFF:
            began_s = watch.stopwatch()
            watch.trace.end_step(plan, batch)
            watch.check_step()
            watch.spent_s += watch.stopwatch() - began_s
        if not watch.damage:
            return False
        self._repair()
        return True

    def recover(self, error: AuditFailed) -> None:
        """Rebuild the books after a verb of the cache raised in its middle.

        Raises:
            AuditFailed: `error` itself, unless the policy is `MemoryCheck.WARN`.
        """
        if self._watch.mode is not MemoryCheck.WARN:
            raise error
        self._watch.note_failure(error)
        self._watch.take_damage()
        self._rebuild(are_turns_whole=False)

    def audit_tiers(self) -> None:
        """Recount what is kept outside of the pools, and drop all of it if that is wrong.
        O(segments), so only on demand."""
        if violations := self._tiers.store.violations():
            self._watch.note_outside(violations)
            self._tiers.clear()

    def report(self, command: ReportMemory, now_s: float) -> MemoryReported:
        """Return the accounts of all pools and what the checker has done."""
        cache, chosen = self._cache, command.session_ids
        listed: Iterable[SlotView] = itertools.islice(cache.slots(), command.max_sessions)
        if chosen is not None:
            listed = (cache.slot(each) for each in chosen[: command.max_sessions] if each in cache)
        return MemoryReported(
            request_id=command.request_id,
            pools={
                str(pool): pool_report(accounts, self._cache.spec)
                for pool, accounts in self._cache.accounts().items()
            },
            rows=self._cache.num_rows,
            rows_free=self._cache.headroom().num_rows,
            num_sessions=len(self._cache),
            sessions=tuple(session_pages(slot) for slot in listed),
            checks=self._checks(now_s),
            trace=self._watch.trace.frozen() if command.trace else (),
            steps=(
                () if command.steps_after is None else self._watch.trace.recent(command.steps_after)
            ),
            tiers=self._tiers.store.report(),
        )

    def _checks(self, now_s: float) -> CheckerReport:
        watch, prober, counters = self._watch, self.prober, self._counters
        engine_s = counters.host_s + counters.forward_s + prober.forward_s
        return CheckerReport(
            runs=sum(watch.runs),
            levels={str(level): num_runs for level, num_runs in enumerate(watch.runs)},
            violations=watch.num_violations,
            recent=tuple(watch.texts),
            quarantined_sessions=tuple(self.quarantined),
            rebuilds=self.num_rebuilds,
            reprefill_tokens=self.num_dropped_tokens,
            probes=prober.num_probes,
            last_probe_ago_s=None if prober.probed_s is None else now_s - prober.probed_s,
            check_ms=watch.spent_s * 1e3,
            probe_ms=prober.forward_s * 1e3,
            cost_share=(watch.spent_s + prober.forward_s) / engine_s if engine_s else 0.0,
        )

    def _repair(self) -> None:
        damage = self._watch.take_damage()
        if damage.session_ids:
            try:
                for session_id in damage.session_ids:
                    self._quarantine(session_id)
            except AuditFailed as error:
                self._watch.note_failure(error)
            else:
                self._watch.audit_all()
            if not self._watch.take_damage() and not damage.must_rebuild:
                return  # the recount shows that the quarantine was enough
        self._rebuild(are_turns_whole=True)

    def _quarantine(self, session_id: SessionId) -> None:
        self._tiers.clear()  # what is wrong may have been copied, also of a session that has closed
        if session_id not in self._cache:
            return
        turn = self._scheduler.turn_of(session_id)
        was_running = turn is not None and turn.state is TurnState.RUNNING
        self.num_dropped_tokens += self._cache.slot(session_id).committed_len
        self.quarantined.append(session_id)
        self._cache.quarantine(session_id)
        self._outbox.emit(SessionCooled(session_id=session_id))
        if turn is not None and was_running:
            error = InternalInconsistency("the memory checker found this turn's KV wrong")
            self._settler.fail_dropped(turn, error)

    def _rebuild(self, *, are_turns_whole: bool) -> None:
        self.num_rebuilds += 1
        if self.num_rebuilds > MAX_REBUILDS:
            raise AuditFailed(f"the books were wrong {self.num_rebuilds} times")
        self._tiers.clear()
        for slot in self._cache.rebuild():
            self.num_dropped_tokens += slot.committed_len
            if slot.borrower is None or not are_turns_whole:
                self._outbox.emit(SessionCooled(session_id=slot.session_id))
        self._outbox.drop_writes()  # their rows are free now
        self._settler.retry_alone.clear()
        for turn in tuple(self._scheduler.running):
            if are_turns_whole:
                self._scheduler.requeue(turn)
            else:
                error = InternalInconsistency("the memory accounts were found wrong and rebuilt")
                self._settler.fail_dropped(turn, error)
        # Nothing is held now, so a violation is a bug in the books themselves: end the engine.
        self._watch.audit_all()
        if self._watch.take_damage():
            raise AuditFailed("the books are wrong right after a rebuild")
