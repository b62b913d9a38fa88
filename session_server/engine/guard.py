"""`MemoryGuard`: check the books after every step, and repair violations with the least damage.

* A violation names a session: the session loses its KV. Its pages go to quarantine, its tokens
  stay, its running turn fails with `internal_inconsistency`, and its next turn computes the context
  again. Then every page is recounted.
* The recount still finds a violation, or no session can be named: the books are rebuilt from zero
  between two steps. Every session loses its KV and keeps its tokens. Running turns are retracted
  and give the same output later.
* A verb of the cache raises in its middle: the books are rebuilt, and running turns fail, since one
  of them was half changed.

The repair does not wait for forwards in flight. Their rows are dropped when they settle, because
their turns have ended or have another attempt. What they still write comes before whatever is
launched from now on, since the device executes in launch order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from cache.errors import AuditFailed
from cache.session_cache import SessionAwareCache
from cache.types import SessionId
from session_server.core.batch import Batch, StepResult
from session_server.core.commands import EngineCommand
from session_server.core.errors import InternalInconsistency
from session_server.core.events import CheckerReport, MemoryReported, SessionCooled
from session_server.engine.config import MemoryCheck
from session_server.engine.memory import MAX_REMEMBERED, MemoryWatch
from session_server.engine.outbox import Outbox
from session_server.engine.plan import StepPlan
from session_server.engine.probing import Prober
from session_server.engine.reporting import pool_report, session_pages
from session_server.engine.scheduler import Scheduler
from session_server.engine.settle import Settler
from session_server.engine.stats import Counters
from session_server.engine.turn import TurnState

MAX_REBUILDS: Final = 8
"""After as many rebuilds the next violation ends the engine, and its supervisor decides."""


class MemoryGuard:
    """Check memory at the end of every step, and repair what is found wrong.

    `quarantined`: the sessions last found wrong. `num_rebuilds`: how often the books were rebuilt.
    `num_dropped_tokens`: tokens whose KV both dropped, to be computed again.
    """

    def __init__(
        self,
        cache: SessionAwareCache,
        watch: MemoryWatch,
        *,
        scheduler: Scheduler,
        settler: Settler,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self._cache = cache
        self.watch = watch
        self._scheduler = scheduler
        self._settler = settler
        self._outbox = outbox
        self._counters = counters
        self.prober = Prober(cache, watch)
        self.quarantined: deque[SessionId] = deque(maxlen=MAX_REMEMBERED)
        self.num_rebuilds = 0
        self.num_dropped_tokens = 0

    @property
    def is_audit_due(self) -> bool:
        """Return whether a recount should begin or go on; see `MemoryWatch.is_audit_due`."""
        return self.watch.is_audit_due

    def touch(self, session_id: SessionId) -> None:
        """Have a session checked at the end of the step."""
        self.watch.touch(session_id)

    def audit_all(self) -> None:
        """Recount everything at once; the end of the step repairs what it finds."""
        self.watch.audit_all()

    def audit_slice(self) -> bool:
        """Recount a part of the memory, and ask for a probe once all is recounted.

        Returns:
            Whether the recount is complete. The next step repairs what it found.
        """
        is_complete = self.watch.audit_slice()
        if is_complete:
            self.prober.request()
        return is_complete

    def begin_step(
        self, now_s: float, commands: Sequence[EngineCommand], results: Sequence[StepResult]
    ) -> None:
        """Begin the record of a step."""
        self.watch.trace.begin_step(now_s, commands, results)

    def end_step(self, plan: StepPlan | None, batch: Batch | None) -> bool:
        """End the record of a step, check what the step touched, and repair violations.

        Returns:
            Whether anything was repaired, so that the next plan may find more than the last one.

        Raises:
            AuditFailed: `MemoryCheck.STRICT` is set, or the books cannot be made right.
        """
        watch = self.watch
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
        if self.watch.mode is not MemoryCheck.WARN:
            raise error
        self.watch.note_failure(error)
        self.watch.take_damage()
        self._rebuild(are_turns_whole=False)

    def report(self, request_id: int, now_s: float, *, with_trace: bool) -> MemoryReported:
        """Return the accounts of all pools and what the checker has done. O(sessions)."""
        return MemoryReported(
            request_id=request_id,
            pools={
                str(pool): pool_report(accounts, self._cache.spec)
                for pool, accounts in self._cache.accounts().items()
            },
            rows=self._cache.num_rows,
            rows_free=self._cache.headroom().num_rows,
            sessions=tuple(session_pages(slot) for slot in self._cache.slots()),
            checks=self._checks(now_s),
            trace=self.watch.trace.frozen() if with_trace else (),
        )

    def _checks(self, now_s: float) -> CheckerReport:
        watch, prober, counters = self.watch, self.prober, self._counters
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
        damage = self.watch.take_damage()
        if damage.session_ids:
            try:
                for session_id in damage.session_ids:
                    self._quarantine(session_id)
            except AuditFailed as error:
                self.watch.note_failure(error)
            else:
                self.watch.audit_all()
            if not self.watch.take_damage() and not damage.must_rebuild:
                return  # the recount shows that the quarantine was enough
        self._rebuild(are_turns_whole=True)

    def _quarantine(self, session_id: SessionId) -> None:
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
        for slot in self._cache.rebuild():
            self.num_dropped_tokens += slot.committed_len
            if slot.borrower is None or not are_turns_whole:
                self._outbox.emit(SessionCooled(session_id=slot.session_id))
        self._outbox.take_writes()  # their rows are free now
        self._settler.retry_alone.clear()
        for turn in tuple(self._scheduler.running):
            if are_turns_whole:
                self._scheduler.requeue(turn)
            else:
                error = InternalInconsistency("the memory accounts were found wrong and rebuilt")
                self._settler.fail_dropped(turn, error)
        # Nothing is held now, so a violation is a bug in the books themselves: end the engine.
        self.watch.audit_all()
        if self.watch.take_damage():
            raise AuditFailed("the books are wrong right after a rebuild")
