"""Count and measure one server, in a Prometheus registry of its own.

Engine events update everything, on the event loop's thread. Labels are from closed sets, so the
number of series is bounded: no ids, no owners.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from session_server.core.errors import WIRE_ERRORS
from session_server.core.events import (
    ACCOUNTS,
    EngineDied,
    EngineEvent,
    EngineStalled,
    EngineStats,
    MemoryReported,
    TokensProduced,
    TurnFailed,
    TurnFinished,
)
from session_server.core.ids import TurnId

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NAMESPACE: Final = "session_server"
_FAST_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW_S: Final = (*_FAST_S, 30.0, 60.0, 300.0)
_ENGINE_TOTALS: Final = (
    "steps",
    "forward_ms",
    "host_ms",
    "draft_tokens",
    "accepted_tokens",
    "retractions",
    "coolings",
    "check_runs",
)

_CHECKER_TOTALS: Final = ("probes", "rebuilds", "reprefill_tokens")
_FAILURE_CODES: Final = frozenset(form.code for form in WIRE_ERRORS.values())


class ReaderKind(StrEnum):
    """Name how a reader of a session is connected."""

    WEBSOCKET = "websocket"
    SSE = "sse"
    HTTP = "http"


class ServerMetrics:
    """Hold the metrics of one server. `now_s` is a monotonic clock in seconds."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._now_s = now_s
        self._turns = _Turns(self.registry)
        self._engine = _Engine(self.registry)
        self._sockets = _Sockets(self.registry)
        self._last_token_s: dict[TurnId, float] = {}

    def on_event(self, event: EngineEvent) -> None:
        """Count one engine event."""
        match event:
            case TokensProduced():
                self._count_tokens(event)
            case TurnFinished():
                self._last_token_s.pop(event.turn_id, None)
                self._turns.count_finished(event)
            case TurnFailed():
                self._last_token_s.pop(event.turn_id, None)
                self._turns.count_failed(event)
            case EngineStats():
                self._engine.set_stats(event)
            case MemoryReported():
                self._engine.set_memory(event)
            case EngineStalled():
                self._engine.stalls.inc()
            case EngineDied():
                self._last_token_s.clear()
                self._engine.count_death()
            case _:
                pass

    def set_live_gauges(self, *, sessions: Callable[[], int], tasks: Callable[[], int]) -> None:
        """Set the callbacks that each scrape reads open sessions and asyncio tasks from."""
        self._sockets.sessions.set_function(sessions)
        self._sockets.tasks.set_function(tasks)

    def connection_opened(self, kind: ReaderKind) -> None:
        """Count a reader that connected."""
        self._sockets.connections.labels(kind).inc()
        self._sockets.connections_total.labels(kind).inc()

    def connection_closed(self, kind: ReaderKind) -> None:
        """Count a reader that disconnected."""
        self._sockets.connections.labels(kind).dec()

    def count_refusal(self, code: str) -> None:
        """Count a request that was refused with this wire code."""
        self._sockets.refusals.labels(code if code in _FAILURE_CODES else "other").inc()

    def observe_loop_lag(self, lag_s: float) -> None:
        """Record how much later than asked the event loop woke up, in seconds."""
        self._sockets.loop_lag.observe(lag_s)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _count_tokens(self, event: TokensProduced) -> None:
        now_s = self._now_s()
        before_s = self._last_token_s.get(event.turn_id)
        if before_s is not None and event.token_ids:
            self._turns.inter_token.observe((now_s - before_s) / len(event.token_ids))
        self._last_token_s[event.turn_id] = now_s


class _Turns:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, namespace=_NAMESPACE, registry=registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=registry)
        self.ended = counter("turns", "Turns ended by the engine.", ["outcome"])
        self.failures = counter("turn_failures", "Turns that failed.", ["code"])
        self.tokens = counter(
            "tokens", "Tokens of ended turns: prompt, cached part of it, and generated.", ["kind"]
        )
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "Time from submission to the first token, in the engine.",
            buckets=_SLOW_S,
        )
        self.inter_token = histogram(
            "inter_token_seconds", "Time between settled tokens of a turn.", buckets=_FAST_S
        )
        self.seconds = histogram(
            "turn_seconds", "Time from submission to the end, in the engine.", buckets=_SLOW_S
        )
        self.queued = histogram(
            "queue_seconds", "Time from submission to the first admission.", buckets=_SLOW_S
        )

    def count_finished(self, event: TurnFinished) -> None:
        self.ended.labels(event.reason.value).inc()
        self.tokens.labels("prompt").inc(event.prompt_tokens)
        self.tokens.labels("cached").inc(event.cached_tokens)
        self.tokens.labels("generated").inc(event.num_outputs)
        timings = event.timings
        self.queued.observe(timings.queue_ms / 1e3)
        # A canceled turn may have made tokens and kept none.
        if event.num_outputs or timings.decode_ms:
            self.ttft.observe(timings.ttft_ms / 1e3)
        self.seconds.observe((timings.ttft_ms + timings.decode_ms) / 1e3)

    def count_failed(self, event: TurnFailed) -> None:
        self.ended.labels("failed").inc()
        self.failures.labels(event.code if event.code in _FAILURE_CODES else "other").inc()


class _Engine:
    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=registry)
        counter = partial(Counter, namespace=_NAMESPACE, registry=registry)
        self.pages = gauge(
            "pages",
            "KV pages by pool and account; the accounts of a pool add up to its pages.",
            ["pool", "account"],
        )
        self.totals = gauge("engine_total", "Totals of the engine since it started.", ["what"])
        self.turns = gauge("engine_turns", "Turns in the engine.", ["state"])
        self.violations = gauge(
            "memory_check_violations",
            "Violated memory invariants since the engine started; anything but 0 is a fault.",
        )
        self.check_cost = gauge(
            "memory_check_cost_ratio",
            "Share of the engine's time that memory checks and probes take.",
        )
        self.deaths = counter("engine_deaths", "Times the engine died.")
        self.stalls = counter("engine_stalls", "Times the engine completed no step for too long.")

    def set_stats(self, event: EngineStats) -> None:
        for what in _ENGINE_TOTALS:
            self.totals.labels(what).set(getattr(event, what))
        self.turns.labels("running").set(event.running)
        self.turns.labels("waiting").set(event.waiting)
        self.violations.set(event.check_violations)

    def count_death(self) -> None:
        self.deaths.inc()
        for state in ("running", "waiting"):
            self.turns.labels(state).set(0)

    def set_memory(self, event: MemoryReported) -> None:
        for pool, report in event.pools.items():
            for account in ACCOUNTS:
                self.pages.labels(pool, account).set(getattr(report, account))
        checks = event.checks
        self.totals.labels("check_runs").set(checks.runs)
        for what in _CHECKER_TOTALS:
            self.totals.labels(what).set(getattr(checks, what))
        self.check_cost.set(checks.cost_share)
        self.violations.set(checks.violations)


class _Sockets:
    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=registry)
        counter = partial(Counter, namespace=_NAMESPACE, registry=registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=registry)
        self.sessions = gauge("sessions", "Open sessions.")
        self.connections = gauge("connections", "Readers connected now.", ["kind"])
        self.connections_total = counter("connections_opened", "Readers that connected.", ["kind"])
        self.refusals = counter("refusals", "Requests refused, by code.", ["code"])
        self.tasks = gauge("event_loop_tasks", "Tasks of the event loop.")
        self.loop_lag = histogram(
            "event_loop_lag_seconds",
            "How much later than asked the event loop woke up.",
            buckets=_FAST_S,
        )
