"""`EngineLoop`: drive `Engine.step` in real time, with one inbox, one clock and one device.

The engine itself knows neither threads nor time. Whoever brings news steps: the thread that has
computed a forward settles it and goes on with the next one, and a thread that has read commands
handles them, even while a forward runs. So no token waits for a change of threads. One thread steps
at a time. The loop's own thread does what is left, which is to recount memory while the engine
rests; otherwise it sleeps, and an idle engine uses no CPU.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from session_server.core.batch import Runner, StepResult
from session_server.core.commands import EngineCommand, ReportMemory
from session_server.core.events import EngineEvent, EnginePulse, EngineReady
from session_server.core.tier_orders import TierCarrier
from session_server.engine.engine import Engine
from session_server.engine_host.alarm import Alarm
from session_server.engine_host.audit_pace import AuditPace
from session_server.engine_host.compiling import Compile, refuse
from session_server.engine_host.device import DeviceThreads
from session_server.engine_host.inbox import MAX_INBOX_BYTES, Inbox, Taken
from session_server.engine_host.progress import Progress
from session_server.engine_host.side_work import SideWork
from session_server.engine_host.tier_threads import NoTiers

MAX_ITEMS_PER_STEP: Final = 512
"""Commands that one step takes, so that many at once do not stop running turns."""

MAX_BYTES_PER_STEP: Final = 2 << 20
"""The same in `memory_bytes`, some 50,000 tokens. The command that reaches the bound may exceed
it."""


@dataclass(frozen=True, slots=True)
class EngineAssembly:
    """Hold what a factory builds: an engine, its runner, and the event that introduces it.

    `compile`: compiles grammars for the runner. `carrier`: copies KV out of its pools and back.
    `watch`: has something that the runner depends on report its end, on a thread of its own.
    """

    engine: Engine
    runner: Runner
    ready: EngineReady
    compile: Compile = refuse
    carrier: TierCarrier = field(default_factory=NoTiers)
    watch: Callable[[Callable[[BaseException], None]], None] = lambda report: None


class EngineLoop:
    """Run one engine until `Shutdown`.

    `emit` is called with the events of one step, on the thread that stepped. While it blocks,
    nothing new is planned: this is the engine's back-pressure.
    """

    def __init__(
        self,
        assembly: EngineAssembly,
        emit: Callable[[list[EngineEvent]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = assembly.engine
        self._emit = emit
        self._clock = clock
        self._inbox = Inbox(MAX_INBOX_BYTES)
        self._device = DeviceThreads(assembly.runner, self._settle, self._fail)
        self._wake = Alarm()
        self._side_work = SideWork(
            self._inbox,
            self._wake.set,
            self._fail,
            compile_=assembly.compile,
            carrier=assembly.carrier,
        )
        self._audit_pace = AuditPace(clock())
        self._progress = Progress()
        self._stepping = threading.Lock()
        self._is_blocked = True
        self._crash: BaseException | None = None
        assembly.watch(self._fail)

    def pulse(self) -> EnginePulse:
        """Return whether steps are completed. Any thread may call it."""
        return self._progress.pulse(self._clock())

    def post(self, command: EngineCommand, *, block: bool = True) -> None:
        """Queue one command for the loop's thread. Any thread may call it.

        Raises:
            queue.Full: `MAX_INBOX_BYTES` of commands wait already and `block` is False.
        """
        self._inbox.put(command, block=block)
        self._wake.set()

    def take(self, commands: Iterable[EngineCommand]) -> None:
        """Handle commands on the calling thread, which may take a step; if another thread steps
        now, leave them to the loop's thread."""
        for command in commands:
            try:
                self._inbox.put(command, block=False)
            except queue.Full:
                self._wake.set()  # the loop's thread makes room
                self._inbox.put(command)
        self._try_to_advance()

    def run(self) -> None:
        """Step until `Shutdown` was handled.

        Raises:
            BaseException: what escapes the engine or the runner, on any thread. It is a bug, and
                the state behind it cannot be trusted: the caller ends the process.
        """
        self._device.start()
        while True:
            with self._stepping:
                self._advance()
                wait_s = self._audit_wait_s()
                if wait_s == 0.0 and not self._is_over:
                    self._audit()
                self._wake.due_s = self._engine.due_s
            if self._is_over:
                break
            if wait_s != 0.0:
                self._sleep(wait_s)
        if self._crash is not None:
            raise self._crash
        self._device.stop()

    @property
    def _is_over(self) -> bool:
        return self._crash is not None or self._engine.has_shut_down

    def _sleep(self, wait_s: float | None) -> None:
        """Sleep until another thread needs this one or the engine has to step, or for so long."""
        self._wake.sleep(wait_s, self._clock())

    # -- what other threads bring

    def _settle(self, result: StepResult) -> None:
        self._inbox.put_result(result)
        # This thread may be the one that computes: it neither waits for one that steps, nor handles
        # commands while the batch waits that it has launched.
        self._try_to_advance(is_computing=True)

    def _try_to_advance(self, *, is_computing: bool = False) -> None:
        """Advance on the calling thread; if another one steps now, leave it to the loop's."""
        if self._stepping.acquire(blocking=False):
            try:
                self._advance_elsewhere(is_computing=is_computing)
            finally:
                self._stepping.release()
        else:
            self._wake.set()

    def _fail(self, error: BaseException) -> None:
        self._crash = self._crash or error
        self._wake.set()

    # -- what only the thread that holds `_stepping` does

    def _advance_elsewhere(self, *, is_computing: bool) -> None:
        """Advance on another thread than the loop's, and wake that one if it has something to do
        now, or to wait for."""
        self._advance(is_computing=is_computing)
        wait_s = self._audit_wait_s()
        may_audit = wait_s is not None and (wait_s == 0.0 or self._engine.is_at_rest)
        if may_audit or self._is_over or not self._inbox.is_empty:
            self._wake.set()
        self._wake.set_before(self._engine.due_s)

    def _advance(self, *, is_computing: bool = False) -> None:
        """Step until nothing waits and another step changes nothing. A thread that `is_computing`
        stops once a batch is launched and more commands wait."""
        try:
            while not self._is_over:
                taken = self._inbox.take(max_items=MAX_ITEMS_PER_STEP, max_bytes=MAX_BYTES_PER_STEP)
                if self._is_blocked and not any(taken) and not self._is_due:
                    break
                has_launched = self._step(taken)
                if is_computing and has_launched and not self._inbox.is_empty:
                    break
        except BaseException as error:  # noqa: BLE001 - raised again on the loop's thread
            self._fail(error)

    @property
    def _is_due(self) -> bool:
        due_s = self._engine.due_s
        return due_s is not None and due_s <= self._clock()

    def _step(self, taken: Taken) -> bool:
        """Take a step, and return whether it launched a batch."""
        commands, results, compiled, copied = taken
        progress, started_s = self._progress, self._clock()
        is_recount = any(isinstance(each, ReportMemory) and each.full for each in commands)
        progress.begin_step(started_s, is_recount=is_recount)
        for result in results:
            progress.end_forward(result, started_s)
        outcome = self._engine.step(started_s, commands, results, compiled, copied=copied)
        self._side_work.submit(outcome)
        if outcome.batch is not None:
            self._device.launch(outcome.batch)
            progress.begin_forward(outcome.batch, self._clock())
        if outcome.events:
            self._emit(outcome.events)
        self._is_blocked = outcome.is_blocked
        ended_s = self._clock()
        progress.end_step(ended_s)
        if outcome.is_blocked:
            progress.wait(has_work=not self._engine.is_at_rest)
        self._engine.counters.host_s += ended_s - started_s
        return outcome.batch is not None

    def _audit_wait_s(self) -> float | None:
        """Return how long to wait for other work before a slice of an audit runs; None if no audit
        is due."""
        if not self._engine.is_audit_due:
            return None
        return self._audit_pace.wait_s(
            self._clock(), self._progress.ended_s, is_at_rest=self._engine.is_at_rest
        )

    def _audit(self) -> None:
        """Run a slice of an audit: whatever comes meanwhile waits for one slice at most."""
        started_s = self._clock()
        try:
            is_complete = self._engine.audit_slice()
        except BaseException as error:  # noqa: BLE001 - raised again once no other thread steps
            self._fail(error)
            return
        self._audit_pace.note_slice(started_s, self._clock(), is_complete=is_complete)
        if is_complete:
            self._is_blocked = False  # the next step acts on what the audit found
