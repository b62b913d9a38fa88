"""The engine: settle -> obey -> plan -> apply, one step at a time, without any IO.

`Engine.step` knows no clock, thread, socket, randomness or device: time and results come in,
events and at most one batch go out, and the same inputs give the same outputs. The same class
serves, runs in the simulator and replays a recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cache.session_cache import SessionAwareCache
from cache.types import TurnId
from session_server.core.batch import Batch, StepResult
from session_server.core.commands import (
    EngineCommand,
)
from session_server.core.errors import (
    InternalInconsistency,
    ServerBusy,
)
from session_server.core.events import (
    EngineEvent,
    SessionCooled,
)
from session_server.engine.drafting import Drafting
from session_server.engine.intake import Intake
from session_server.engine.memory import MemoryWatch
from session_server.engine.outbox import Outbox
from session_server.engine.plan import Limits, plan_step
from session_server.engine.reporting import Reporter
from session_server.engine.scheduler import Scheduler
from session_server.engine.settings import EngineSettings
from session_server.engine.settle import Settler
from session_server.engine.stats import Counters
from session_server.engine.turn import TurnState
from session_server.engine.view import LiveView


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step gave. `batch` must be launched, in the order of the steps.

    `is_blocked`: stepping again makes no difference until a command or a result arrives.
    """

    events: list[EngineEvent]
    batch: Batch | None
    is_blocked: bool


class Engine:
    """All turns of one device."""

    def __init__(self, cache: SessionAwareCache, settings: EngineSettings) -> None:
        self._cache = cache
        self._settings = settings
        self._outbox = Outbox()
        self.counters = Counters()
        self._scheduler = Scheduler(cache, self._outbox, self.counters)
        self._memory = MemoryWatch(cache, settings.memory.check)
        self._drafting = Drafting(cache, settings.speculation)
        self._settler = Settler(
            settings,
            cache=cache,
            scheduler=self._scheduler,
            outbox=self._outbox,
            counters=self.counters,
            memory=self._memory,
        )
        self._launched: deque[Batch] = deque()
        self._num_launches = 0
        self._reporter = Reporter(
            cache, self._outbox, self._scheduler, counters=self.counters, memory=self._memory
        )
        self._intake = Intake(
            settings,
            cache=cache,
            scheduler=self._scheduler,
            settler=self._settler,
            outbox=self._outbox,
            memory=self._memory,
        )

    @property
    def max_turn_len(self) -> int:
        """Longest context one turn may reach; see `Intake.max_turn_len`."""
        return self._intake.max_turn_len

    @property
    def is_in_flight(self) -> bool:
        """Whether a launch is not settled."""
        return bool(self._launched)

    @property
    def has_left(self) -> bool:
        """Whether `Shutdown` was obeyed and the last launch is settled."""
        return self._intake.is_leaving and not self._launched

    @property
    def is_audit_due(self) -> bool:
        """Whether the engine is idle and has worked since its last full audit."""
        return not self._scheduler and not self._launched and self._memory.is_audit_due

    def step(
        self, now_s: float, commands: Sequence[EngineCommand], results: Sequence[StepResult]
    ) -> StepOutcome:
        """Advance by one step.

        Args:
            now_s: seconds of any monotonic clock.
            commands: in the order they were sent.
            results: of launched batches, in the order of their launches.
        """
        for result in results:
            self._settler.settle(self._launched.popleft(), result, now_s)
        for command in commands:
            self._intake.obey(command, now_s)
        batch, is_blocked = self._launch(now_s)
        self._check_memory(now_s)
        self._reporter.report(now_s, has_worked=bool(results or batch))
        return StepOutcome(self._outbox.take_events(), batch, is_blocked)

    def audit_idle(self) -> None:
        """Recount all memory in a moment of rest, see `is_audit_due`; the next step acts on it."""
        self._memory.audit_all()

    # Launching

    def _launch(self, now_s: float) -> tuple[Batch | None, bool]:
        """The next batch, if there is one to launch, and whether to wait for news."""
        if self._intake.is_leaving or not self._scheduler:
            return None, True
        if len(self._launched) >= self._settings.num_in_flight:
            return None, True
        suspects = self._settler.suspects
        if suspects and self._launched:
            return None, True
        # A suspect is launched alone: nobody else runs, waits or is asked to give.
        running = suspects[:1] if suspects else self._scheduler.running
        waiting = () if suspects else self._scheduler.waiting
        self._drafting.guess(running)
        view = LiveView(self._cache, running, waiting, self.is_in_flight)
        plan = plan_step(view, self._limits)
        applied = self._scheduler.apply(plan, now_s)
        for session_id in applied.let_go:
            self._memory.touch(session_id)
        for turn, error in applied.refused:
            self._settler.fail(turn, error, now_s)
        if plan.refuse is not None:
            self._give_up(plan.refuse, now_s)
        if not applied.rows:
            return None, plan.is_empty
        self._num_launches += 1
        batch = Batch(self._num_launches, tuple(applied.rows), self._outbox.take_writes())
        self._launched.append(batch)
        return batch, len(self._launched) >= self._settings.num_in_flight

    def _give_up(self, turn_id: TurnId, now_s: float) -> None:
        """Nothing runs, nothing can be taken, and this turn does not fit: it must not hang.

        Happens only when pages are lost to quarantine, since a turn that cannot fit the pool is
        refused when it is submitted.
        """
        turn = self._scheduler.find(turn_id)
        assert turn is not None
        if turn in self._settler.suspects:
            self._settler.suspects.remove(turn)  # alone it cannot take pages; let it join the rest
            return
        error = ServerBusy("the memory left does not hold this turn")
        self._settler.fail(turn, error, now_s)

    @property
    def _limits(self) -> Limits:
        return Limits(
            num_tokens=self._settings.chunk_tokens,
            num_turns=self._settings.max_running,
            page_size=self._cache.stores.page_size,
        )

    # Memory

    def _check_memory(self, now_s: float) -> None:
        self._memory.check_step()
        for session_id in self._memory.take_doubtful():
            if session_id not in self._cache:
                continue
            turn = self._scheduler.turn_of(session_id)
            was_running = turn is not None and turn.state is TurnState.RUNNING
            self._cache.quarantine(session_id, now=now_s)
            self._outbox.emit(SessionCooled(session_id=session_id))
            if turn is not None and was_running:
                error = InternalInconsistency("the memory checker found this turn's KV wrong")
                self._settler.forget(turn, error)
