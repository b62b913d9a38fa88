"""Connect the session manager to the engine: track its state, send commands, await replies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from session_server.core.commands import (
    MAX_REPORTED_SESSIONS,
    EngineCommand,
    FlushCache,
    MeasureKV,
    OpenSession,
    ReportMemory,
    WriteKV,
)
from session_server.core.engine_client import EngineClient, EventListener
from session_server.core.errors import EngineUnavailable
from session_server.core.events import (
    CacheFlushed,
    EngineDied,
    EngineEvent,
    EngineReady,
    EngineResumed,
    EngineStalled,
    EngineStats,
    KVMeasured,
    KVWritten,
    MemoryReported,
)
from session_server.core.ids import SessionId

ANSWER_DEADLINE_S: Final = 60.0
"""A full audit of a large pool takes seconds; an engine that takes longer than this hangs."""

STALLED_ANSWER_DEADLINE_S: Final = 1.0
"""An engine that completes no step may still answer; wait no longer than this."""

_Request = ReportMemory | FlushCache | MeasureKV | WriteKV
_Answer = MemoryReported | CacheFlushed | KVMeasured | KVWritten


class EngineLink:
    """Track one engine as the server sees it: up, restarting, or gone for good."""

    def __init__(
        self, client: EngineClient, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._clock = clock
        self._request_ids = itertools.count(1)
        self._waiting: dict[_Request, asyncio.Future[Any]] = {}
        # Bounded: at most a cancel or stop per live turn and a close per session.
        self._unsent: deque[EngineCommand] = deque()
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.is_up = False
        self.is_gone = False
        self.ready_s = 0.0
        """When the last engine came up."""

        self.generation = 0
        """Number of engines lost so far. What one engine knew is not valid for the next."""
        self._stalled_since_s: float | None = None

    @property
    def stalled_s(self) -> float | None:
        """Return the seconds since the last step of an engine that stalls; None for any other."""
        since_s = self._stalled_since_s
        return None if since_s is None else self._clock() - since_s

    async def start(self, listeners: Sequence[EventListener]) -> EngineReady:
        """Start the engine; every event, the first `EngineReady` too, goes to all listeners."""

        def dispatch(event: EngineEvent) -> None:
            for listener in listeners:
                listener(event)

        ready = await self._client.start(dispatch)
        if self.ready is None or self.ready.epoch < ready.epoch:
            dispatch(ready)
        return ready

    async def stop(self) -> None:
        """Stop the engine."""
        self.mark_gone()
        await self._client.stop()

    def mark_gone(self) -> None:
        """Mark the engine as gone for good and fail all pending requests."""
        self._mark_down("the engine was stopped")
        self.is_gone = True

    def send(self, command: EngineCommand) -> None:
        """Send a command after those that could not be sent before.

        Raises:
            EngineUnavailable: there is no engine, or it takes nothing more at the moment; the
                command was not sent.
        """
        self.check_up()
        self.resend()
        self._client.send(command)

    def check_up(self) -> None:
        """Raise EngineUnavailable if there is no engine."""
        if not self.is_up:
            raise EngineUnavailable("there is no engine at the moment")

    def send_or_queue(self, command: EngineCommand) -> None:
        """Send a command, or queue it while the engine accepts nothing. If the engine dies
        meanwhile, the command is dropped: a new engine knows nothing of what it refers to."""
        try:
            self.send(command)
        except EngineUnavailable:
            if self.is_up:
                self._unsent.append(command)

    def resend(self) -> None:
        """Send the commands that `send_or_queue` has queued. Raises EngineUnavailable if the engine
        still takes nothing."""
        while self._unsent:
            self._client.send(self._unsent[0])
            self._unsent.popleft()

    async def memory(
        self,
        *,
        full: bool = False,
        trace: bool = False,
        max_sessions: int = MAX_REPORTED_SESSIONS,
        session_ids: tuple[SessionId, ...] | None = None,
        steps_after: int | None = None,
    ) -> MemoryReported:
        """Request the memory accounts; see `ReportMemory`. Raises EngineUnavailable."""
        request = ReportMemory(
            request_id=next(self._request_ids),
            full=full,
            trace=trace,
            max_sessions=max_sessions,
            session_ids=session_ids,
            steps_after=steps_after,
        )
        report: MemoryReported = await self._request(request)
        return report

    async def flush(self) -> bool:
        """Request an empty cache; return False if turns were live. Raises EngineUnavailable."""
        flushed: CacheFlushed = await self._request(FlushCache(request_id=next(self._request_ids)))
        return flushed.done

    async def measure_kv(self, opened: OpenSession, *, tokens: bytes, base_len: int) -> KVMeasured:
        """Request how much of a context has KV; see `MeasureKV`. `opened`: how its session is, or
        would be, opened. Raises EngineUnavailable."""
        measured: KVMeasured = await self._request(
            MeasureKV(
                request_id=next(self._request_ids),
                session_id=opened.session_id,
                tenant_salt=opened.tenant_salt,
                tenant=opened.tenant,
                tokens=tokens,
                base_len=base_len,
            )
        )
        return measured

    async def write_kv(self, session_id: SessionId, *, cut: int) -> KVWritten:
        """Request that KV is written to disk; see `WriteKV`. Raises EngineUnavailable."""
        request_id = next(self._request_ids)
        write = WriteKV(request_id=request_id, session_id=session_id, cut=cut)
        written: KVWritten = await self._request(write)
        return written

    @property
    def is_flushing(self) -> bool:
        """Return whether a flush was requested and has not been answered yet."""
        return any(isinstance(request, FlushCache) for request in self._waiting)

    def on_event(self, event: EngineEvent) -> None:
        """Process events about the engine itself; ignore all others."""
        match event:
            case EngineReady():
                self.ready, self.ready_s = event, self._clock()
                self.is_up = True
                self.is_gone = False
            case EngineDied(message=message, will_restart=will_restart):
                self._mark_down(message)
                self.is_gone = not will_restart
            case EngineStalled(stalled_s=stalled_s):
                self._stalled_since_s = self._clock() - stalled_s
                self._fail_requests("the engine completes no step")
            case EngineResumed():
                self._stalled_since_s = None
            case EngineStats():
                self.stats = event
            case MemoryReported():
                self._update_checks(event)
                self._resolve(event)
            case CacheFlushed() | KVMeasured() | KVWritten():
                self._resolve(event)
            case _:
                return

    def _update_checks(self, report: MemoryReported) -> None:
        """Update the check counts from an audit on demand, which is newer than the last sample; an
        idle engine never sends a new sample."""
        if self.stats is not None:
            self.stats = msgspec.structs.replace(
                self.stats,
                check_runs=report.checks.runs,
                check_violations=report.checks.violations,
            )

    async def _request(self, request: _Request) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        try:
            self.send(request)
            is_stalled = self._stalled_since_s is not None
            deadline_s = STALLED_ANSWER_DEADLINE_S if is_stalled else ANSWER_DEADLINE_S
            return await asyncio.wait_for(future, deadline_s)
        except TimeoutError as error:
            raise EngineUnavailable("the engine did not answer") from error
        finally:
            del self._waiting[request]

    def _resolve(self, event: _Answer) -> None:
        for request, future in self._waiting.items():
            if request.request_id == event.request_id and not future.done():
                future.set_result(event)

    def _mark_down(self, message: str) -> None:
        self.is_up = False
        self.generation += 1
        self.stats = None  # they describe the lost engine
        self._stalled_since_s = None
        self._unsent.clear()
        self._fail_requests(message)

    def _fail_requests(self, message: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineUnavailable(message))
