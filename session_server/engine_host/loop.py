"""`EngineLoop`: drive `Engine.step` in real time, with one inbox, one clock and one device.

The engine itself knows neither threads nor time. Commands and results meet in one queue here. The
thread sleeps on it whenever the engine is blocked, so an idle engine uses no CPU.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from session_server.core.batch import CompileResult, Runner, StepResult
from session_server.core.commands import EngineCommand, ReportMemory
from session_server.core.events import EngineEvent, EnginePulse, EngineReady
from session_server.engine.engine import Engine
from session_server.engine_host.audit_pace import AuditPace
from session_server.engine_host.compiling import Compile, CompileThreads, refuse
from session_server.engine_host.device import DeviceCrash, DeviceThreads
from session_server.engine_host.inbox import MAX_INBOX_BYTES, Inbox, InboxItem, memory_bytes
from session_server.engine_host.progress import Progress

MAX_ITEMS_PER_STEP: Final = 512
"""Inbox items that one step takes, so that many commands at once do not stop running turns."""

MAX_BYTES_PER_STEP: Final = 2 << 20
"""The same in `memory_bytes`, some 50,000 tokens. The item that reaches the bound may exceed it."""


@dataclass(frozen=True, slots=True)
class EngineAssembly:
    """Hold what a factory builds: an engine, its runner, and the event that introduces it.

    `compile`: compiles grammars for the runner.
    """

    engine: Engine
    runner: Runner
    ready: EngineReady
    compile: Compile = refuse


class EngineLoop:
    """Run one engine until `Shutdown`.

    `emit` is called on the loop's thread with the events of one step. While it blocks, nothing new
    is planned: this is the engine's back-pressure.
    """

    def __init__(
        self,
        assembly: EngineAssembly,
        emit: Callable[[list[EngineEvent]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = assembly.engine
        self._runner = assembly.runner
        self._compile = assembly.compile
        self._emit = emit
        self._clock = clock
        self._inbox = Inbox(MAX_INBOX_BYTES)
        self._audit_pace = AuditPace(clock())
        self._progress = Progress()

    def pulse(self) -> EnginePulse:
        """Return whether steps are completed. Any thread may call it."""
        return self._progress.pulse(self._clock())

    def post(self, command: EngineCommand, *, block: bool = True) -> None:
        """Queue one command, from any thread.

        Raises:
            queue.Full: `MAX_INBOX_BYTES` of commands wait already and `block` is False.
        """
        self._inbox.put(command, block=block)

    def run(self) -> None:
        """Step until `Shutdown` was handled.

        Raises:
            BaseException: what escapes the engine or the runner. It is a bug, and the state behind
                it cannot be trusted: the caller ends the process.
        """
        device, progress = DeviceThreads(self._runner, self._inbox.put), self._progress
        compiling = CompileThreads(self._compile, self._inbox.put)
        is_blocked = True
        while not self._engine.has_shut_down:
            commands, results, compiled = self._drain(is_blocked=is_blocked)
            started_s = self._clock()
            is_recount = any(isinstance(each, ReportMemory) and each.full for each in commands)
            progress.begin_step(started_s, is_recount=is_recount)
            for result in results:
                progress.end_forward(result, started_s)
            outcome = self._engine.step(started_s, commands, results, compiled)
            compiling.submit(outcome.to_compile)
            if outcome.batch is not None:
                device.launch(outcome.batch)
                progress.begin_forward(outcome.batch, self._clock())
            if outcome.events:
                self._emit(outcome.events)
            is_blocked = outcome.is_blocked
            ended_s = self._clock()
            progress.end_step(ended_s)
            self._engine.counters.host_s += ended_s - started_s
        device.stop()

    def _drain(
        self, *, is_blocked: bool
    ) -> tuple[list[EngineCommand], list[StepResult], list[CompileResult]]:
        commands: list[EngineCommand] = []
        results: list[StepResult] = []
        compiled: list[CompileResult] = []
        num_bytes = 0
        item = self._wait() if is_blocked else None
        for _ in range(MAX_ITEMS_PER_STEP):
            if num_bytes >= MAX_BYTES_PER_STEP:
                break
            try:
                item = item or self._inbox.get_nowait()
            except queue.Empty:
                break
            num_bytes += memory_bytes(item)
            match item:
                case DeviceCrash(cause):
                    raise cause
                case StepResult():
                    results.append(item)
                case CompileResult():
                    compiled.append(item)
                case _:
                    commands.append(item)
            item = None
        return commands, results, compiled

    def _wait(self) -> InboxItem | None:
        """Return the next item; None after an audit, because the next step acts on what it found.

        An audit runs in slices, only while the inbox is empty. So an item waits for the rest of one
        slice at most.
        """
        self._progress.wait(has_work=not self._engine.is_at_rest)
        idle_since_s = self._clock()
        while self._engine.is_audit_due:
            wait_s = self._audit_pace.wait_s(
                self._clock(), idle_since_s, is_at_rest=self._engine.is_at_rest
            )
            try:
                return self._inbox.get(timeout=wait_s)
            except queue.Empty:
                started_s = self._clock()
                is_complete = self._engine.audit_slice()
                self._audit_pace.note_slice(started_s, self._clock(), is_complete=is_complete)
                if is_complete:
                    return None
        return self._inbox.get()
