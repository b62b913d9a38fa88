"""One trace per turn, from socket to settle, with nothing in it that was said."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Literal

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

from session_server import wiring
from session_server.config import HttpOptions, Settings
from session_server.core.events import TurnTimings
from session_server.core.origin import MAX_UNDELIVERED, Origin
from session_server.core.session_events import TokenUsage
from session_server.core.turn_report import TurnReport
from session_server.metrics.tracing import (
    MAX_WAITING_TURNS,
    TracingUnavailable,
    TurnTracing,
    asks_for_traces,
    attributes_of,
    open_tracing,
    stages_of,
)
from tests.observe.collector import Collector, of_turn
from tests.web.serving import DEADLINE_S, serving, turn

CANARY = "canary-4711"
TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
GIVING_UP_S = 2.0
"""Less than an exporter waits between its last attempts."""

RECORD = TurnReport(
    session_id="s",
    turn_id="t",
    status="completed",
    reason="stop",
    is_chat=True,
    max_tokens=16,
    usage=TokenUsage(10, 7, 2, drafted_tokens=3, reasoning_tokens=1),
    num_retractions=1,
    timings=TurnTimings(
        queue_ms=100.0,
        prefill_ms=200.0,
        ttft_ms=300.0,
        decode_ms=400.0,
        forward_ms=9.0,
        num_steps=3,
    ),
    origin=Origin(9.0, "r", {"traceparent": TRACEPARENT}),
    received_s=9.0,
    asked_s=9.5,
    checked_s=9.6,
    begun_s=9.7,
    sent_s=10.0,
    first_token_s=10.4,
    ended_s=11.0,
)


@pytest.fixture(autouse=True)
def no_exporter_is_left() -> Iterator[None]:
    """One that tries again draws random numbers, which other tests have for themselves."""
    yield
    for thread in threading.enumerate():
        if thread.name == "OtelBatchSpanRecordProcessor":
            thread.join(GIVING_UP_S)
            assert not thread.is_alive(), "an exporter outlives its server's tracing"


@contextmanager
def traced(collector: Collector) -> Iterator[TurnTracing]:
    """What exports to a collector; everything has arrived behind the block."""
    tracing = open_tracing(collector.url, model="paper")
    try:
        yield tracing
    finally:
        tracing.close()


def shape(record: TurnReport) -> list[tuple[str, float, float]]:
    return [(s.name, round(s.begin_s, 3), round(s.end_s, 3)) for s in stages_of(record)]


def test_the_stages_of_a_turn_follow_each_other_from_socket_to_settle() -> None:
    assert shape(RECORD) == [
        ("receive", 9.0, 9.5),
        ("submit", 9.5, 10.0),
        ("check grammar", 9.5, 9.6),
        ("wait for turn", 9.6, 9.7),
        ("render and tokenize", 9.7, 10.0),
        ("queue", 10.0, 10.1),
        ("prefill", 10.1, 10.3),
        ("decode", 10.3, 10.7),
        ("settle", 10.7, 11.0),
    ]


def test_a_turn_has_the_stages_that_it_came_to() -> None:
    never_sent = dataclasses.replace(
        RECORD, checked_s=None, begun_s=None, sent_s=None, timings=None, origin=None
    )
    assert shape(never_sent) == [("receive", 9.0, 9.5), ("submit", 9.5, 11.0)]
    lost = dataclasses.replace(RECORD, timings=None, checked_s=None)
    assert shape(lost)[-1] == ("engine", 10.0, 11.0)
    early = dataclasses.replace(RECORD, ended_s=10.6)
    assert shape(early)[-1] == ("settle", 10.6, 10.6), "an engine's clock begins a little later"


def test_a_trace_arrives_with_its_parent_and_its_attributes() -> None:
    with Collector() as collector, traced(collector) as tracing:
        begin_ns = time.time_ns() - int((time.monotonic() - RECORD.received_s) * 1e9)
        tracing.on_turn(RECORD)
        tracing.on_turn(dataclasses.replace(RECORD, status="failed", reason="device_failed"))
        for delivered in RECORD.origin.take_undelivered() if RECORD.origin else ():
            delivered(11.5)
        tracing.close()
        spans = collector.wait_for("deliver")
    assert collector.resources[0]["service.name"] == "session-server"
    assert {span.trace_id for span in spans} == {"ab" * 16}
    root, failed = (span for span in spans if span.name == "chat paper")
    assert (root.parent_id, root.is_error) == ("cd" * 8, False)
    assert (failed.is_error, failed.attributes["error.type"]) == (True, "device_failed")
    assert abs(root.begin_ns - begin_ns) < 10**9
    assert abs(root.end_ns - root.begin_ns - 2 * 10**9) < 10**6
    children = [span for span in spans if span.parent_id == root.span_id]
    names = ["receive", "submit", "queue", "prefill", "decode", "settle", "deliver"]
    assert sorted(span.name for span in children) == sorted(names)
    assert root.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "session_server",
        "gen_ai.request.model": "paper",
        "gen_ai.response.model": "paper",
        "gen_ai.request.max_tokens": 16,
        "gen_ai.conversation.id": "s",
        "gen_ai.response.id": "t",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 7,
        "gen_ai.usage.cache_creation.input_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 1,
        "gen_ai.response.time_to_first_chunk": pytest.approx(1.4),
        "session_server.turn.status": "completed",
        "session_server.drafted_tokens": 3,
        "session_server.retractions": 1,
        "session_server.request.id": "r",
        "session_server.forwards": 3,
        "session_server.forward_ms": 9.0,
    }


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "session-server"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,team=a"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=a"}, "session-server"),
    ],
)
def test_a_service_is_called_what_the_environment_calls_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with Collector() as collector, traced(collector) as tracing:
        tracing.on_turn(RECORD)
        tracing.close()
        collector.wait_for("settle")
    described = collector.resources[0]
    assert described["service.name"] == name
    assert described.get("team") == ("a" if "team=a" in str(variables) else None)
    assert described["service.version"] == version("session-server")


def test_attributes_are_named_as_opentelemetry_names_them() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    named = {name for name in attributes_of(RECORD, model="m") if name.startswith("gen_ai.")}
    assert named <= known


@pytest.mark.parametrize(
    ("status", "reason", "name"),
    [
        ("completed", "length", "gen_ai.response.finish_reasons"),
        ("cancelled", "client", "session_server.turn.cancel_reason"),
        ("failed", "engine_restarting", "error.type"),
    ],
)
def test_what_ended_a_turn_is_called_by_what_it_is(
    status: Literal["completed", "cancelled", "failed"], reason: str, name: str
) -> None:
    record = dataclasses.replace(RECORD, status=status, reason=reason, first_token_s=None)
    told = attributes_of(record, model="m")
    assert [key for key, value in told.items() if value in (reason, (reason,))] == [name]
    assert "gen_ai.response.time_to_first_chunk" not in told


def test_what_the_client_did_not_sample_is_not_exported() -> None:
    origin = Origin(9.0, "r", {"traceparent": TRACEPARENT[:-1] + "0"})
    with Collector() as collector:
        with traced(collector) as tracing:
            tracing.on_turn(dataclasses.replace(RECORD, origin=origin))
            for delivered in origin.take_undelivered():
                delivered(12.0)
        assert collector.spans == []


@pytest.mark.parametrize("num_ended", [MAX_UNDELIVERED - 1, MAX_UNDELIVERED, MAX_UNDELIVERED + 1])
def test_turns_that_await_their_delivery_are_bounded(num_ended: int) -> None:
    origin = Origin(9.0, "r")
    with Collector() as collector, traced(collector) as tracing:
        for _ in range(num_ended):
            tracing.on_turn(dataclasses.replace(RECORD, origin=origin))
    assert len(origin.take_undelivered()) == min(num_ended, MAX_UNDELIVERED)
    assert not origin.take_undelivered()


@pytest.mark.parametrize("num_ended", [MAX_WAITING_TURNS + step for step in (-1, 0, 1)])
def test_turns_that_wait_for_their_spans_are_bounded(num_ended: int) -> None:
    gate = Gate()
    tracing = TurnTracing(TracerProvider(sampler=gate, shutdown_on_exit=False), model="paper")
    record = dataclasses.replace(RECORD, origin=None)
    tracing.on_turn(record)
    gate.is_reached.wait()
    for _ in range(num_ended):
        tracing.on_turn(record)
    gate.is_open.set()
    tracing.close()
    assert gate.num_asked == 1 + min(num_ended, MAX_WAITING_TURNS)


class Gate(Sampler):
    """Sample nothing, and that only once it is open."""

    def __init__(self) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        self.num_asked = 0

    def should_sample(self, *_asked: Any, **_options: Any) -> SamplingResult:
        self.num_asked += 1
        self.is_reached.set()
        self.is_open.wait()
        return SamplingResult(Decision.DROP)

    def get_description(self) -> str:
        return "gate"


def test_turns_over_sockets_and_http_are_traced_and_their_texts_are_not() -> None:
    async def talk(tracing: TurnTracing) -> None:
        async with serving() as this:
            this.sessions.on_turn_ended(tracing.on_turn)
            headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
            async with this.socket(additional_headers=headers) as wire:
                this.is_held = True
                said = turn(f"{CANARY} over a socket")
                await wire.send("turn.create", turn_id="over-socket", **said)
                await wire.until("turn.created")
                await wire.send("ping")
                await wire.until("pong")
                this.is_held = False
                await wire.until("turn.completed")
            session_id = await this.open()
            body = {"turn_id": "over-http", **turn(f"{CANARY} over HTTP")}
            odd = {"traceparent": f"not-{CANARY}", "tracestate": "x" * 600}
            path = f"/v1/sessions/{session_id}/turns"
            answer = await this.http.post(path, json=body, headers=odd)
            assert answer.status_code == 200

    with Collector() as collector:
        with traced(collector) as tracing:
            asyncio.run(talk(tracing))
        spans = collector.wait_for("deliver")
    root, *stages = of_turn(spans, "over-socket")
    assert (root.trace_id, root.parent_id) == ("ab" * 16, "cd" * 8)
    assert root.attributes["session_server.request.id"] == "mine"
    wanted = {"receive", "submit", "queue", "prefill", "decode", "settle", "deliver"}
    assert {stage.name for stage in stages} == wanted
    assert all(s.begin_ns < s.end_ns for s in stages if s.name in ("receive", "deliver"))
    root, *stages = of_turn(spans, "over-http")
    assert (root.parent_id, {stage.name for stage in stages}) == ("", wanted)
    assert root.trace_id != "ab" * 16
    assert not any(CANARY.encode() in body for body in collector.bodies)


def test_a_collector_that_refuses_costs_nothing_but_its_spans(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Collector(status=400) as collector, caplog.at_level(logging.ERROR):
        with traced(collector) as tracing:
            tracing.on_turn(RECORD)
        assert collector.spans == []
    assert any("400" in line for line in caplog.messages)


class Endless:
    """A collector whose answers never end; `num_bytes` were taken of them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1/traces"

    def answer_one(self) -> None:
        with self._listener:
            connection, _ = self._listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                self.num_bytes += connection.send(bytes(1 << 16))


def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    collector = Endless()
    answering = threading.Thread(target=collector.answer_one)
    answering.start()
    tracing = open_tracing(collector.url, model="paper")
    tracing.on_turn(RECORD)
    tracing.close()
    answering.join(DEADLINE_S)
    assert not answering.is_alive(), "nobody ended the connection"
    assert collector.num_bytes < 64 << 20, "what the kernel has taken, and little more"


def test_the_log_does_not_show_the_key_in_the_address_of_a_collector(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with caplog.at_level(logging.WARNING):
        tracing = open_tracing(f"http://127.0.0.1:{port}/v1/traces?key={CANARY}", model="paper")
        tracing.on_turn(RECORD)
        tracing.close()
    assert "/v1/traces?..." in caplog.text
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "environment", "asks"),
    [
        (None, {}, False),
        ("http://a/v1/traces", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, True),
        ("http://a", {"OTEL_SDK_DISABLED": "true"}, False),
        ("http://a", {"OTEL_TRACES_EXPORTER": "none"}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_traces_are_asked_for_by_a_flag_or_the_environment(
    endpoint: str | None, environment: dict[str, str], asks: bool
) -> None:
    assert asks_for_traces(endpoint, environment) is asks


def test_without_the_extra_a_flag_is_refused_and_the_environment_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert wiring.make_tracing(Settings(), model="m") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    flagged = Settings(http=HttpOptions(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"))
    with pytest.raises(TracingUnavailable, match="pip install 'session-server\\[otel\\]'"):
        wiring.make_tracing(flagged, model="m")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with caplog.at_level(logging.WARNING):
        assert wiring.make_tracing(Settings(), model="m") is None
    assert "session-server[otel]" in caplog.text


def test_opentelemetry_is_loaded_only_where_it_is_asked_for() -> None:
    code = "import sys, session_server.wiring; print('opentelemetry.sdk' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"
