"""Export one OpenTelemetry trace per turn, from socket to settle.

The spans of a turn are made when it has ended, from times that are known by then anyway: those of
the server's stages, and the engine's durations of the turn. So a token costs nothing, and the
engine needs no clock. Spans hold ids, lengths, counts and times, never what was said.

A thread makes the spans, because the dozen of a turn takes half a millisecond that the event loop
has not. The SDK exports them in batches from a thread of its own; of those that wait it keeps 2,048
(`OTEL_BSP_MAX_QUEUE_SIZE`), and drops the rest.

OpenTelemetry is an optional extra, `session-server[otel]`, and is imported only where traces are
asked for.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

from session_server.core.turn_report import TurnReport

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

ENDPOINT_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)
"""Either of them asks for traces."""

_logger: Final = logging.getLogger("session_server")

CLOSE_TIMEOUT_S: Final = 3.0
"""Seconds that the process waits at its end for spans that are not exported yet."""

MAX_WAITING_TURNS: Final = 1024
"""Ended turns, and their deliveries, that wait for their spans; further ones are not traced."""

PROVIDER: Final = "session_server"


class TracingUnavailable(Exception):
    """Traces were asked for, and OpenTelemetry is not installed."""


class Stage(NamedTuple):
    """Name one span of a turn, with its begin and end in monotonic seconds. `parent`: "" is the
    whole turn."""

    name: str
    begin_s: float
    end_s: float
    parent: str = ""


def asks_for_traces(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Return whether a flag or OpenTelemetry's own variables ask for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return False
    return bool(endpoint) or any(environment.get(name) for name in ENDPOINT_VARIABLES)


def open_tracing(endpoint: str | None, *, model: str) -> TurnTracing:
    """Return what exports traces over OTLP/HTTP. `endpoint`: where to, with its path; None: where
    the environment says.

    Raises:
        TracingUnavailable: the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from session_server.metrics.collector import collector_session, hide_queries
    except ImportError as error:
        raise TracingUnavailable(
            f"traces need OpenTelemetry: pip install 'session-server[otel]' ({error})"
        ) from error
    ours = {"service.name": "session-server", "service.version": version("session-server")}
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say wins over what we call ourselves.
    described = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=described, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, session=collector_session())
    hide_queries(logging.getLogger(OTLPSpanExporter.__module__))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return TurnTracing(provider, model=model, give_up=exporter.shutdown)


@dataclass(slots=True, eq=False)
class _TracedTurn:
    """Hold a turn and, once its spans are made and are sampled, what is below it."""

    record: TurnReport
    to_wall_ns: int
    context: Context | None = None


class TurnTracing:
    """Make the spans of turns. `give_up` ends an export that is tried again and again; `now_s` is
    the clock of the records, `time_ns` the wall clock."""

    def __init__(
        self,
        provider: TracerProvider,
        *,
        model: str,
        give_up: Callable[[], None] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("session_server", version("session-server"))
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._give_up = give_up
        self._now_s, self._time_ns = now_s, time_ns
        self._waiting: queue.Queue[tuple[_TracedTurn, float | None] | None]
        self._waiting = queue.Queue(MAX_WAITING_TURNS)
        threading.Thread(target=self._make_spans, name="spans", daemon=True).start()

    def on_turn(self, record: TurnReport) -> None:
        """Have the spans of an ended turn made, and later that of its delivery."""
        turn = _TracedTurn(record, self._time_ns() - int(self._now_s() * 1e9))
        self._put(turn, None)
        if record.origin is not None:
            record.origin.on_delivery(partial(self._put, turn))

    def close(self) -> None:
        """Export what waits, for at most `CLOSE_TIMEOUT_S`; nothing is tried again afterwards."""
        closing = threading.Thread(target=self._close, name="close traces", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if closing.is_alive() and self._give_up is not None:
            self._give_up()

    def _close(self) -> None:
        self._waiting.put(None)
        self._waiting.join()
        self._provider.shutdown()

    def _put(self, turn: _TracedTurn, delivered_s: float | None) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((turn, delivered_s))

    def _make_spans(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            turn, delivered_s = waiting
            try:
                if delivered_s is None:
                    self._add_turn(turn)
                elif turn.context is not None:
                    stage = Stage("deliver", turn.record.ended_s, delivered_s)
                    self._add(stage, turn.context, turn.to_wall_ns)
            except Exception:
                _logger.exception("the spans of a turn were not made")
            self._waiting.task_done()
        self._waiting.task_done()

    def _add_turn(self, turn: _TracedTurn) -> None:
        trace, record, to_wall_ns = self._trace, turn.record, turn.to_wall_ns
        stages = stages_of(record)
        carrier = (record.origin.trace if record.origin is not None else None) or {}
        root = self._tracer.start_span(
            f"{operation_of(record)} {self._model}",
            context=self._propagator.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes=attributes_of(record, model=self._model),
            start_time=to_wall_ns + int(record.received_s * 1e9),
        )
        if not root.is_recording():
            return  # not sampled
        contexts = {"": trace.set_span_in_context(root)}
        for stage in stages:
            contexts[stage.name] = self._add(stage, contexts[stage.parent], to_wall_ns)
        if record.status == "failed":
            root.set_status(trace.Status(trace.StatusCode.ERROR))
        root.end(to_wall_ns + int(record.ended_s * 1e9))
        turn.context = contexts[""]

    def _add(self, stage: Stage, parent: Context, to_wall_ns: int) -> Context:
        begin_ns = to_wall_ns + int(stage.begin_s * 1e9)
        span = self._tracer.start_span(stage.name, context=parent, start_time=begin_ns)
        span.end(to_wall_ns + int(stage.end_s * 1e9))
        return self._trace.set_span_in_context(span)


def stages_of(record: TurnReport) -> list[Stage]:
    """Return the spans of a turn but `deliver`, parents first. A stage that it did not come to has
    none."""
    asked_s, sent_s, ended_s = record.asked_s, record.sent_s, record.ended_s
    submitted_s = ended_s if sent_s is None else sent_s
    stages = [Stage("receive", record.received_s, asked_s), Stage("submit", asked_s, submitted_s)]
    waits_from_s = asked_s
    if record.checked_s is not None:
        stages.append(Stage("check grammar", asked_s, record.checked_s, "submit"))
        waits_from_s = record.checked_s
    if record.begun_s is not None:
        stages.append(Stage("wait for turn", waits_from_s, record.begun_s, "submit"))
        stages.append(Stage("render and tokenize", record.begun_s, submitted_s, "submit"))
    if sent_s is None:
        return stages
    timings = record.timings
    if timings is None:
        return [*stages, Stage("engine", sent_s, ended_s)]
    admitted_s = sent_s + timings.queue_ms / 1e3
    first_s = sent_s + timings.ttft_ms / 1e3
    done_s = first_s + timings.decode_ms / 1e3
    # The engine began to count a little after this server sent the turn.
    late_s = min(0.0, ended_s - done_s)
    engine = (("queue", sent_s, admitted_s), ("prefill", admitted_s, first_s))
    stages += [Stage(name, begin_s + late_s, end_s + late_s) for name, begin_s, end_s in engine]
    if timings.decode_ms:
        stages.append(Stage("decode", first_s + late_s, done_s + late_s))
    return [*stages, Stage("settle", done_s + late_s, ended_s)]


def operation_of(record: TurnReport) -> str:
    """Return what OpenTelemetry calls a turn of messages, or of text or token ids."""
    return "chat" if record.is_chat else "text_completion"


def attributes_of(record: TurnReport, *, model: str) -> dict[str, AttributeValue]:
    """Return the attributes of a turn: OpenTelemetry's conventions for generative AI, and ours."""
    usage, timings = record.usage, record.timings
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation_of(record),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.conversation.id": record.session_id,
        "gen_ai.response.id": record.turn_id,
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "session_server.turn.status": record.status,
        "session_server.drafted_tokens": usage.drafted_tokens,
        "session_server.retractions": record.num_retractions,
    }
    if record.origin is not None:
        attributes["session_server.request.id"] = record.origin.request_id
    match record.status:
        case "completed":
            attributes["gen_ai.response.finish_reasons"] = (record.reason,)
        case "cancelled":
            attributes["session_server.turn.cancel_reason"] = record.reason
        case "failed":
            attributes["error.type"] = record.reason
        case _:
            assert_never(record.status)
    if record.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    if timings is not None:
        attributes["session_server.forwards"] = timings.num_steps
        attributes["session_server.forward_ms"] = timings.forward_ms
    return attributes
