"""`ServerWatch`: look at the server once a second while somebody wants to know, for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Final

import msgspec

from session_server.core.errors import EngineUnavailable, ServerBusy
from session_server.core.events import EngineStats, MemoryReported
from session_server.protocol.operations import (
    CountsBody,
    EngineBody,
    EngineState,
    FirstTokensBody,
    RatesBody,
    SampleBody,
    TotalsBody,
)
from session_server.protocol.resources import MemoryBody
from session_server.sessions.overview import SessionOverview, percentile
from session_server.web.event_stream import event_chunk
from session_server.web.services import AppServices
from session_server.web.timeline import Timeline

SAMPLE_INTERVAL_S: Final = 1.0
SAMPLE_TIMEOUT_S: Final = 1.0
"""A sample does not wait longer than this for the accounts of a busy engine."""

MAX_LISTENERS: Final = 16
"""Readers of the samples at a time. They share what is computed; each is sent all of it."""

_logger: Final = logging.getLogger("session_server.web")

_TOTALS: Final = TotalsBody.__struct_fields__


class ServerWatch:
    """Make samples while there are listeners; a task runs only then.

    A listener that reads slowly gets the newest sample when it reads again, and none in between.
    """

    def __init__(self, services: AppServices, overview: SessionOverview) -> None:
        self._services, self._overview = services, overview
        self._timeline = Timeline(overview.turn_name)
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes | None] | None = None
        self._before: tuple[float, int, EngineStats | None] | None = None
        self.num_listeners = 0
        self.num_samples = 0

    @property
    def is_running(self) -> bool:
        """Return whether samples are made."""
        return self._task is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Count a listener inside the block, which must be entered before its answer begins.
        Raises ServerBusy."""
        if self.num_listeners >= MAX_LISTENERS:
            raise ServerBusy(f"{self.num_listeners} readers of these events, the maximum.")
        self.num_listeners += 1
        try:
            yield
        finally:
            self.num_listeners -= 1
            if self.num_listeners == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    async def chunks(self, may_listen: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Yield each sample as a server-sent event, until the server drains or the reader may not
        have them any more."""
        while may_listen():
            chunk = await asyncio.shield(self._next_chunk())
            if chunk is None:
                return
            yield chunk

    def _next_chunk(self) -> asyncio.Future[bytes | None]:
        """Return what the next sample will resolve; None ends the streams."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="server watch")
            self._next = asyncio.get_running_loop().create_future()
        assert self._next is not None, "made with the task"
        return self._next

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._before = None
        self._services.metrics.recent.take()
        is_last = False
        while not is_last:
            began_s = loop.time()
            is_last = self._services.sessions.is_draining
            try:
                chunk = await self._sample(began_s)
            except Exception:
                _logger.exception("a sample failed")
                break
            assert self._next is not None
            done, self._next = self._next, loop.create_future()
            done.set_result(chunk)
            del done, chunk
            await asyncio.sleep(max(0.0, began_s + SAMPLE_INTERVAL_S - loop.time()))
        assert self._next is not None
        self._task = None
        self._next.set_result(None)

    async def _sample(self, began_s: float) -> bytes:
        sessions = self._services.sessions
        epoch = 0 if sessions.engine_ready is None else sessions.engine_ready.epoch
        if self._before is None or self._before[1] != epoch:
            self._timeline.clear()
        report = await self._report()
        recent, stats = self._services.metrics.recent.take(), sessions.stats().engine
        before_s, epoch_before, stats_before = self._before or (began_s, epoch, None)
        interval_s = began_s - before_s
        known = stats_before if epoch_before == epoch else None
        forwards = self._timeline.read(() if report is None else report.steps)
        self._before = began_s, epoch, stats
        self.num_samples += 1
        sample = SampleBody(
            interval_s=round(interval_s, 3),
            engine=self._engine(),
            memory=None if report is None else _memory(report),
            totals=None if stats is None else _totals(stats),
            rates=None if stats is None or known is None else _rates(known, stats, interval_s),
            first_tokens=_first_tokens(recent.ttft_ms),
            counts=self._counts(),
            loop_lag_ms=round(recent.lag_s * 1e3, 3),
            listeners=self.num_listeners,
            timeline=forwards,
        )
        return event_chunk(sample, seq=self.num_samples)

    async def _report(self) -> MemoryReported | None:
        with contextlib.suppress(TimeoutError, EngineUnavailable):
            async with asyncio.timeout(SAMPLE_TIMEOUT_S):
                return await self._overview.report(steps_after=self._timeline.last_step)
        return None

    def _engine(self) -> EngineBody:
        sessions = self._services.sessions
        ready, stalled_s = sessions.engine_ready, sessions.engine_stalled_s
        state: EngineState = "draining" if sessions.is_draining else "up"
        if ready is None or stalled_s is not None:
            state = "down" if ready is None else "stalled"
        return EngineBody(
            state=state,
            stalled_s=round(stalled_s or 0.0, 3),
            epoch=0 if ready is None else ready.epoch,
            device="" if ready is None else ready.device,
            dtype="" if ready is None else ready.dtype,
            backend="" if ready is None else ready.backend,
            max_model_len=self._services.max_context,
        )

    def _counts(self) -> CountsBody:
        stats, counts = self._services.sessions.stats(), self._services.metrics.counts()
        return CountsBody(
            open_sessions=stats.sessions,
            resident_sessions=stats.resident_sessions,
            live_turns=stats.live_turns,
            queued_turns=stats.queued_turns,
            readers=counts.readers,
            resumes=counts.resumes,
            refusals=counts.refusals,
            evictions={str(reason): count for reason, count in stats.evictions.items()},
        )


def _memory(report: MemoryReported) -> MemoryBody:
    return msgspec.convert(report, MemoryBody, from_attributes=True)


def _totals(stats: EngineStats) -> TotalsBody:
    return TotalsBody(**{name: getattr(stats, name) for name in _TOTALS})


def _rates(before: EngineStats, now: EngineStats, interval_s: float) -> RatesBody:
    num_input = now.prompt_tokens - before.prompt_tokens
    num_cached = now.cached_tokens - before.cached_tokens
    forward_s = (now.forward_ms - before.forward_ms) / 1e3
    return RatesBody(
        output_tokens_per_s=round((now.generated_tokens - before.generated_tokens) / interval_s, 1),
        input_tokens_per_s=round((num_input - num_cached) / interval_s, 1),
        cached_share=round(num_cached / num_input, 4) if num_input else None,
        forwards_per_s=round((now.steps - before.steps) / interval_s, 1),
        busy_share=round(min(1.0, forward_s / interval_s), 4),
    )


def _first_tokens(ttft_ms: tuple[float, ...]) -> FirstTokensBody:
    return FirstTokensBody(
        turns=len(ttft_ms), p50_ms=percentile(ttft_ms, 0.5), p95_ms=percentile(ttft_ms, 0.95)
    )
