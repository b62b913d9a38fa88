"""Count and measure one server, in a Prometheus registry of its own.

Events of the engine, ended turns and the web layer update it, on the event loop's thread. Labels
are from closed sets, so the number of series is bounded: no ids, no owners. The values of a label
exclude each other, so that their sum is one too; what is a part of something has its own name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from typing import Final, Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from session_server.core.errors import INTERNAL_ERROR, WIRE_ERRORS
from session_server.core.events import (
    ACCOUNTS,
    EngineDied,
    EngineEvent,
    EngineReady,
    EngineStalled,
    EngineStats,
    MemoryReported,
    TokensProduced,
    TurnFailed,
    TurnFinished,
)
from session_server.core.ids import TurnId
from session_server.core.turn_report import TurnReport
from session_server.metrics.engine_totals import EngineTotals
from session_server.metrics.live import LiveCollector
from session_server.metrics.recent import Recent
from session_server.protocol.errors import HTTP_CODES

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
disable_created_metrics()  # type: ignore[no-untyped-call]  # they double what is scraped
_NAMESPACE: Final = "session_server"
_FAST_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW_S: Final = (*_FAST_S, 30.0, 60.0, 300.0)
MAX_TIMED_TURNS: Final = 1 << 15
"""Turns whose last token is remembered, to time the next. More than may run at once."""

_OUTCOMES: Final = ("stop", "length", "cancelled", "failed")
_FAILURE_CODES: Final = frozenset(form.code for form in WIRE_ERRORS.values())
_REFUSAL_CODES: Final = _FAILURE_CODES.union(
    HTTP_CODES.values(), (INTERNAL_ERROR.code, "invalid_request")
)


ResumeOutcome = Literal["resumed", "offset_lost", "epoch_changed"]


class ReaderKind(StrEnum):
    """Name how a client that reads turns is connected."""

    WEBSOCKET = "websocket"
    SSE = "sse"
    HTTP = "http"


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """Hold connections open now by kind, and since the start readers that came back by outcome
    and refusals by code."""

    readers: dict[str, int]
    resumes: dict[str, int]
    refusals: dict[str, int]


class ServerMetrics:
    """Hold the metrics of one server. `now_s` is a monotonic clock in seconds. `live.read` is set
    by whoever serves."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._now_s = now_s
        self._turns = _Turns(self.registry)
        self._engine = _Engine(self.registry)
        self._sockets = _Sockets(self.registry)
        self._last_token_s: dict[TurnId, float] = {}
        self.recent = Recent()
        self.live = LiveCollector(_NAMESPACE)
        self.registry.register(self.live)
        # Of the server's own process, where the system tells it; the engine has another.
        ProcessCollector(registry=self.registry)
        build = Gauge(
            "build_info", "1, with the version.", ["version"], _NAMESPACE, registry=self.registry
        )
        build.labels(version("session-server")).set(1)

    def on_event(self, event: EngineEvent) -> None:
        """Count one engine event."""
        match event:
            case TokensProduced():
                self._count_tokens(event)
            case TurnFinished() | TurnFailed():
                self._last_token_s.pop(event.turn_id, None)
            case EngineReady():
                self._engine.begin(event)
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

    def on_turn(self, report: TurnReport) -> None:
        """Count one turn that was accepted and has ended, whether or not it came to the engine."""
        self._turns.count(report)
        if report.ttft_s is not None:
            self.recent.note_first_token(report.ttft_s * 1e3)

    def connection_opened(self, kind: ReaderKind) -> None:
        """Count a connection that was opened."""
        self._sockets.connections.labels(kind).inc()
        self._sockets.connections_total.labels(kind).inc()

    def connection_closed(self, kind: ReaderKind) -> None:
        """Count a connection that has ended."""
        self._sockets.connections.labels(kind).dec()

    def connection_ended(self, code: str) -> None:
        """Count a WebSocket that the server has closed. `code`: the name of a close code."""
        self._sockets.closes.labels(code).inc()

    def count_resume(self, outcome: ResumeOutcome) -> None:
        """Count a reader that came back and asked for what it had missed."""
        self._sockets.resumes.labels(outcome).inc()

    def count_request(self, route: str, status: int) -> None:
        """Count an HTTP request that has ended. `route`: method and path of its route."""
        self._sockets.requests.labels(route, status).inc()

    def count_refusal(self, code: str) -> None:
        """Count a request that was refused with this code: of a wire error, or the HTTP layer's."""
        self._sockets.refusals.labels(code if code in _REFUSAL_CODES else "other").inc()

    def observe_loop_lag(self, lag_s: float) -> None:
        """Record how much later than asked the event loop woke up, in seconds."""
        self._sockets.loop_lag.observe(lag_s)
        self.recent.note_lag(lag_s)

    def counts(self) -> ServerCounts:
        """Return what is connected now, and what was counted since the start."""
        sockets = self._sockets
        return ServerCounts(
            readers=_values(sockets.connections, "kind"),
            resumes=_values(sockets.resumes, "outcome"),
            refusals=_values(sockets.refusals, "code"),
        )

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _count_tokens(self, event: TokensProduced) -> None:
        now_s = self._now_s()
        before_s = self._last_token_s.get(event.turn_id)
        if before_s is not None and event.token_ids:
            self._turns.inter_token.observe((now_s - before_s) / len(event.token_ids))
        if before_s is not None or len(self._last_token_s) < MAX_TIMED_TURNS:
            self._last_token_s[event.turn_id] = now_s


def _values(metric: Gauge | Counter, label: str) -> dict[str, int]:
    samples = (sample for family in metric.collect() for sample in family.samples)
    return {sample.labels[label]: int(sample.value) for sample in samples}


class _Turns:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, namespace=_NAMESPACE, registry=registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=registry)
        self.ended = counter("turns", "Accepted turns that have ended.", ["outcome"])
        for outcome in _OUTCOMES:
            self.ended.labels(outcome)
        self.failures = counter("turn_failures", "Those of them that failed.", ["code"])
        for code in sorted(_FAILURE_CODES):
            self.failures.labels(code)  # what appears with its first failure shows no increase
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "Time from the arrival of a turn's request to its first token, all waiting included.",
            buckets=_SLOW_S,
        )
        self.inter_token = histogram(
            "inter_token_seconds", "Time between settled tokens of a turn.", buckets=_FAST_S
        )
        self.seconds = histogram(
            "turn_seconds",
            "Time from the arrival of a turn's request to its end, however it ends.",
            buckets=_SLOW_S,
        )
        self.queued = histogram(
            "queue_seconds",
            "Time that turns wait in the engine for their first admission; not their wait for "
            "earlier turns of their session.",
            buckets=_SLOW_S,
        )

    def count(self, report: TurnReport) -> None:
        is_completed, has_failed = report.status == "completed", report.status == "failed"
        self.ended.labels(report.reason if is_completed else report.status).inc()
        if has_failed:
            code = report.reason
            self.failures.labels(code if code in _FAILURE_CODES else "other").inc()
        if report.timings is not None:
            self.queued.observe(report.timings.queue_ms / 1e3)
        if report.ttft_s is not None:
            self.ttft.observe(report.ttft_s)
        self.seconds.observe(report.ended_s - report.received_s)


class _Engine:
    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=registry)
        counter = partial(Counter, namespace=_NAMESPACE, registry=registry)
        self.pages = gauge(
            "pages",
            "KV pages by pool and account; the accounts of a pool add up to its pages.",
            ["pool", "account"],
        )
        self.kv_usage = gauge(
            "kv_usage_ratio",
            "Share of a pool's pages that turns and sessions hold: all but the free ones and what "
            "only the prefix cache keeps.",
            ["pool"],
        )
        self.page_tokens = gauge("page_tokens", "Tokens of a page.", ["pool"])
        self.page_bytes = gauge("page_bytes", "Bytes of a page in all layers.", ["pool"])
        self.info = gauge(
            "engine_info", "1, with what the engine runs on.", ["device", "dtype", "backend"]
        )
        self.totals = EngineTotals(_NAMESPACE, registry)
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
        self.restarts = counter("engine_restarts", "Times a new engine came up after a death.")
        self.stalls = counter("engine_stalls", "Times the engine completed no step for too long.")

    def set_stats(self, event: EngineStats) -> None:
        self.totals.add_stats(event)
        self.turns.labels("running").set(event.running)
        self.turns.labels("waiting").set(event.waiting)
        self.violations.set(event.check_violations)

    def begin(self, event: EngineReady) -> None:
        self.info.clear()
        self.info.labels(event.device, event.dtype, event.backend).set(1)
        if event.epoch > 1:
            self.restarts.inc()

    def count_death(self) -> None:
        self.deaths.inc()
        self.totals.begin_engine()
        for state in ("running", "waiting"):
            self.turns.labels(state).set(0)

    def set_memory(self, event: MemoryReported) -> None:
        for pool, report in event.pools.items():
            for account in ACCOUNTS:
                self.pages.labels(pool, account).set(getattr(report, account))
            num_spare = report.free + report.tree_evictable
            self.kv_usage.labels(pool).set(1.0 - num_spare / report.pages)
            self.page_tokens.labels(pool).set(report.page_size)
            self.page_bytes.labels(pool).set(report.page_bytes)
        checks = event.checks
        self.totals.add_checks(checks)
        self.check_cost.set(checks.cost_share)
        self.violations.set(checks.violations)


class _Sockets:
    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=registry)
        counter = partial(Counter, namespace=_NAMESPACE, registry=registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=registry)
        self.connections = gauge(
            "connections", "WebSockets, event streams and HTTP requests for turns now.", ["kind"]
        )
        self.connections_total = counter(
            "connections_opened", "Such connections since the start.", ["kind"]
        )
        self.refusals = counter(
            "refusals",
            "Requests, sockets and frames refused, by code; not accepted turns that fail.",
            ["code"],
        )
        self.requests = counter(
            "http_requests",
            "HTTP requests by route and status; 499 is one whose client left before its answer.",
            ["route", "status"],
        )
        self.resumes = counter(
            "resumes",
            "Readers that came back for what they had missed, by whether it was still there.",
            ["outcome"],
        )
        self.closes = counter("socket_closes", "WebSockets closed by the server.", ["code"])
        for outcome in get_args(ResumeOutcome):
            self.resumes.labels(outcome)
        self.loop_lag = histogram(
            "event_loop_lag_seconds",
            "How much later than asked the event loop woke up.",
            buckets=_FAST_S,
        )
