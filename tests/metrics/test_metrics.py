"""What the operator reads: numbers that add up, lines that stay lines."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import pytest
from msgspec.structs import replace

from session_server.core.events import (
    CheckerReport,
    EngineDied,
    EngineReady,
    EngineResumed,
    EngineStalled,
    FinishReason,
    MemoryReported,
    PoolReport,
    SessionCooled,
    SizeCounts,
    TierReport,
    TokensProduced,
    TurnFailed,
    TurnFinished,
    TurnTimings,
)
from session_server.core.ids import SessionId, TurnId
from session_server.core.origin import Origin
from session_server.core.session_events import CloseReason, TokenUsage
from session_server.core.turn_report import TurnReport
from session_server.metrics.live import LiveState
from session_server.metrics.logging import (
    LOGGERS,
    EventLog,
    JsonFormatter,
    OneLineFormatter,
    TerminalFormatter,
    TurnLog,
    configure_logging,
)
from session_server.metrics.prometheus import MAX_TIMED_TURNS, ReaderKind, ServerMetrics
from tests.engine_stats import engine_stats

TIMINGS = TurnTimings(
    queue_ms=1.0, prefill_ms=2.0, ttft_ms=30.0, decode_ms=40.0, forward_ms=5.0, num_steps=6
)
FINISHED = TurnFinished(
    turn_id=TurnId("t"),
    session_id=SessionId("s"),
    reason=FinishReason.STOP,
    matched_token=4,
    history_len=12,
    prompt_tokens=10,
    cached_tokens=7,
    num_outputs=2,
    num_retractions=3,
    timings=TIMINGS,
)
FAILED = TurnFailed(
    turn_id=TurnId("t2"),
    session_id=SessionId("s"),
    code="numerical_error",
    message="bad",
    history_len=0,
)
REPORT = MemoryReported(
    request_id=1,
    pools={
        "full": PoolReport(
            pages=10,
            page_size=16,
            page_bytes=4096,
            free=1,
            reserved=1,
            tree_evictable=1,
            tree_protected=1,
            session_held=1,
            active=1,
            fenced=1,
            spill=1,
            quarantine=2,
        )
    },
    rows=4,
    rows_free=4,
    num_sessions=0,
    sessions=(),
    checks=CheckerReport(
        runs=5,
        levels={"0": 3, "2": 2},
        violations=1,
        recent=("x",),
        reprefill_tokens=70,
        cost_share=0.01,
    ),
)
STATS = engine_stats(
    steps=9,
    forward_ms=90.0,
    host_ms=9.0,
    prompt_tokens=10,
    cached_tokens=7,
    generated_tokens=2,
    retractions=1,
    coolings=3,
    running=1,
    waiting=2,
    sessions=1,
    check_runs=5,
)
READY = EngineReady(
    epoch=1,
    max_turn_len=1,
    vocab_size=1,
    eos_token_ids=(),
    page_size=1,
    num_pages=1,
    device="cpu",
    dtype="float32",
    backend="torch",
)
CLOSES = get_args(CloseReason)
ENDED = TurnReport(
    session_id="s",
    turn_id="t",
    status="completed",
    reason="stop",
    is_chat=True,
    max_tokens=16,
    usage=TokenUsage(10, 7, 2),
    num_retractions=3,
    timings=TIMINGS,
    origin=Origin(0.5, "r"),
    received_s=0.5,
    asked_s=1.0,
    checked_s=None,
    begun_s=1.25,
    sent_s=1.5,
    first_token_s=1.75,
    ended_s=2.0,
)


class Clock:
    """A clock the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_finished_turn_counts_once_with_its_tokens_and_times() -> None:
    clock = Clock()
    metrics = ServerMetrics(now_s=clock)
    for now_s in (1.0, 1.25):
        clock.now_s = now_s
        metrics.on_event(TokensProduced(turn_id=TurnId("t"), token_ids=(5,)))
    metrics.on_event(FINISHED)
    metrics.on_turn(ENDED)
    outcomes = ("stop", "length", "cancelled", "failed")
    counts = [value(metrics, "session_server_turns_total", outcome=each) for each in outcomes]
    assert counts == [1, 0, 0, 0]
    assert value(metrics, "session_server_inter_token_seconds_sum") == 0.25
    assert value(metrics, "session_server_time_to_first_token_seconds_sum") == 1.25
    assert value(metrics, "session_server_turn_seconds_sum") == 1.5
    assert value(metrics, "session_server_queue_seconds_sum") == 0.001
    assert metrics.recent.take().ttft_ms == (1250.0,)


@pytest.mark.parametrize(("first_token_s", "num_first_tokens"), [(1.75, 1), (None, 0)])
def test_a_canceled_turn_counts_its_whole_time(
    first_token_s: float | None, num_first_tokens: int
) -> None:
    metrics = ServerMetrics(now_s=Clock())
    canceled = dataclasses.replace(
        ENDED, status="cancelled", reason="client", timings=None, first_token_s=first_token_s
    )
    metrics.on_turn(canceled)
    assert value(metrics, "session_server_turns_total", outcome="cancelled") == 1
    assert value(metrics, "session_server_turn_seconds_sum") == 1.5
    assert value(metrics, "session_server_queue_seconds_count") == 0
    name = "session_server_time_to_first_token_seconds_count"
    assert value(metrics, name) == num_first_tokens
    assert len(metrics.recent.take().ttft_ms) == num_first_tokens


def test_every_decade_of_seconds_has_the_same_buckets() -> None:
    metrics = ServerMetrics(now_s=Clock())
    (family,) = (
        family
        for family in metrics.registry.collect()
        if family.name == "session_server_inter_token_seconds"
    )
    bounds = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
    assert bounds == [
        *("0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5"),
        *("1.0", "2.5", "5.0", "10.0", "+Inf"),
    ]


def test_failures_are_counted_by_code_and_unknown_codes_together() -> None:
    metrics = ServerMetrics(now_s=Clock())
    name = "session_server_turn_failures_total"
    assert value(metrics, name, code="numerical_error") == 0, "so that its first one is an increase"
    for code in ("numerical_error", "made\nup"):
        metrics.on_event(replace(FAILED, code=code))
        metrics.on_turn(dataclasses.replace(ENDED, status="failed", reason=code))
    assert value(metrics, name, code="numerical_error") == 1
    assert value(metrics, name, code="other") == 1
    assert value(metrics, "session_server_turns_total", outcome="failed") == 2


def test_the_accounts_of_a_pool_are_shown_and_add_up() -> None:
    metrics = ServerMetrics(now_s=Clock())
    metrics.on_event(REPORT)
    metrics.on_event(STATS)
    lines = metrics.exposition().decode().splitlines()
    pages = [line for line in lines if line.startswith("session_server_pages{")]
    assert sum(float(line.split()[-1]) for line in pages) == 10
    assert value(metrics, "session_server_retractions_total") == 1
    assert value(metrics, "session_server_memory_checks_total") == 5
    assert value(metrics, "session_server_reprefill_tokens_total") == 70
    assert value(metrics, "session_server_kv_usage_ratio", pool="full") == pytest.approx(0.8)
    assert value(metrics, "session_server_page_tokens", pool="full") == 16
    assert value(metrics, "session_server_memory_check_cost_ratio") == 0.01
    assert value(metrics, "session_server_engine_turns", state="waiting") == 2


def test_what_tiers_have_done_and_may_hold_is_shown() -> None:
    metrics = ServerMetrics(now_s=Clock())
    tiers = TierReport(failed_copies=5, no_room_files=3, disk_bytes=70, disk_max_bytes=90)
    metrics.on_event(replace(STATS, tiers=tiers))
    assert value(metrics, "session_server_kv_failed_copies_total") == 5
    assert value(metrics, "session_server_kv_no_room_files_total") == 3


def test_nothing_runs_in_an_engine_that_died() -> None:
    metrics = ServerMetrics(now_s=Clock())
    metrics.on_event(STATS)
    metrics.on_event(EngineDied(message="killed", will_restart=True))
    states = ("running", "waiting")
    assert [value(metrics, "session_server_engine_turns", state=s) for s in states] == [0, 0]


def test_readers_refusals_sessions_and_lag_are_counted() -> None:
    metrics = ServerMetrics(now_s=Clock())
    metrics.connection_opened(ReaderKind.WEBSOCKET)
    metrics.connection_opened(ReaderKind.WEBSOCKET)
    metrics.connection_closed(ReaderKind.WEBSOCKET)
    metrics.count_refusal("session_busy")
    metrics.count_refusal("whatever a client made up")
    metrics.observe_loop_lag(0.5)
    metrics.on_event(EngineDied(message="killed", will_restart=True))
    assert value(metrics, "session_server_connections", kind="websocket") == 1
    assert value(metrics, "session_server_connections_opened_total", kind="websocket") == 2
    assert value(metrics, "session_server_refusals_total", code="other") == 1
    assert value(metrics, "session_server_event_loop_lag_seconds_sum") == 0.5
    assert value(metrics, "session_server_engine_deaths_total") == 1


def test_what_a_lost_engine_has_done_stays_counted() -> None:
    metrics = ServerMetrics(now_s=Clock())
    sizes = SizeCounts(counts=(1, 2, *(0,) * 13), total=5)
    metrics.on_event(replace(STATS, batch_rows=sizes))
    metrics.on_event(replace(STATS, batch_rows=sizes))
    assert value(metrics, "session_server_forwards_total") == 9
    assert value(metrics, "session_server_forward_seconds_total") == pytest.approx(0.09)
    metrics.on_event(EngineDied(message="killed", will_restart=True))
    metrics.on_event(replace(READY, epoch=2, device="cuda"))
    metrics.on_event(replace(STATS, steps=4, forward_ms=10.0, batch_rows=sizes))
    assert value(metrics, "session_server_forwards_total") == 13
    assert value(metrics, "session_server_forward_seconds_total") == pytest.approx(0.1)
    assert value(metrics, "session_server_prompt_tokens_cached_total") == 14
    assert value(metrics, "session_server_engine_restarts_total") == 1
    name = "session_server_forward_turns"
    assert [value(metrics, f"{name}_bucket", le=le) for le in ("1", "2", "+Inf")] == [2, 6, 6]
    assert [value(metrics, f"{name}_{what}") for what in ("count", "sum")] == [6, 10]
    labels = {"device": "cuda", "dtype": "float32", "backend": "torch"}
    assert value(metrics, "session_server_engine_info", **labels) == 1


@pytest.mark.parametrize("num_turns", [MAX_TIMED_TURNS - 1, MAX_TIMED_TURNS, MAX_TIMED_TURNS + 1])
def test_turns_whose_tokens_are_timed_are_bounded_and_forgotten(num_turns: int) -> None:
    metrics = ServerMetrics(now_s=Clock())
    events = [TokensProduced(turn_id=TurnId(f"t{n}"), token_ids=(5,)) for n in range(num_turns)]
    for event in events * 2:
        metrics.on_event(event)
    count = "session_server_inter_token_seconds_count"
    assert value(metrics, count) == min(num_turns, MAX_TIMED_TURNS)
    for event in events:
        metrics.on_event(replace(FAILED, turn_id=event.turn_id))
    for event in events[:1] * 2:
        metrics.on_event(event)
    assert value(metrics, count) == min(num_turns, MAX_TIMED_TURNS) + 1


def test_a_scrape_shows_what_is_held_then() -> None:
    metrics = ServerMetrics(now_s=Clock())
    assert value(metrics, "session_server_sessions") is None
    state = LiveState(
        sessions=3,
        resident_sessions=2,
        opened_sessions=9,
        closed_sessions={"expired": 6},
        evictions={"pressure": 4},
        turns={"live": 1, "queued": 0},
        grammar_checks={"passed": 8},
        budgets={"turns": (1, 16)},
        tasks=7,
        is_engine_up=True,
        stalled_s=0.0,
    )
    metrics.live.read = lambda: state
    assert value(metrics, "session_server_sessions") == 3
    assert value(metrics, "session_server_resident_sessions") == 2
    assert value(metrics, "session_server_event_loop_tasks") == 7
    closed = {r: value(metrics, "session_server_sessions_closed_total", reason=r) for r in CLOSES}
    assert closed == {"client": 0, "expired": 6, "revoked": 0, "draining": 0}
    assert value(metrics, "session_server_session_evictions_total", reason="pressure") == 4
    assert value(metrics, "session_server_session_evictions_total", reason="flush") == 0
    assert value(metrics, "session_server_budget_limit", budget="turns") == 16
    assert value(metrics, "session_server_engine_up") == 1


def test_every_metric_says_what_it_counts_and_none_has_a_label_without_bound() -> None:
    metrics = ServerMetrics(now_s=Clock())
    metrics.on_event(READY)
    metrics.on_event(REPORT)
    named = {
        label
        for family in metrics.registry.collect()
        for sample in family.samples
        if family.name.startswith("session_server_")
        for label in sample.labels
    }
    assert all(family.documentation.endswith(".") for family in metrics.registry.collect())
    assert named <= {
        *("account", "backend", "code", "device", "dtype", "kind", "le", "outcome", "pool"),
        *("reason", "state", "version"),
    }


def test_no_label_sets_a_part_beside_the_whole_that_it_is_a_part_of() -> None:
    metrics = ServerMetrics(now_s=Clock())
    metrics.on_event(replace(STATS, draft_tokens=5, accepted_tokens=4))
    names = (
        *("prompt_tokens", "prompt_tokens_cached", "generation_tokens"),
        *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("input_draft_tokens", "input_draft_tokens_used"),
    )
    counts = [value(metrics, f"session_server_{name}_total") for name in names]
    assert counts == [10, 7, 2, 5, 4, 0, 0]
    assert re.findall(r"tokens\w*_total{", metrics.exposition().decode()) == []


def test_graphs_are_counted_by_what_came_of_a_forward_over_restarts_of_the_engine() -> None:
    metrics = ServerMetrics(now_s=Clock())

    def counts() -> list[float]:
        name = "session_server_cuda_graph_forwards_total"
        return [value(metrics, name, outcome=outcome) for outcome in ("replayed", "many_tokens")]

    for replayed, many_tokens in ((5, 1), (9, 1)):
        uses = {"replayed": replayed, "many_tokens": many_tokens}
        metrics.on_event(replace(STATS, graph_uses=uses))
    assert counts() == [9, 1]
    metrics.on_event(EngineDied(message="gone", will_restart=True))
    metrics.on_event(replace(STATS, graph_uses={"replayed": 2, "many_tokens": 3}))
    assert counts() == [11, 4]


def test_two_servers_in_one_process_count_apart() -> None:
    one, other = ServerMetrics(now_s=Clock()), ServerMetrics(now_s=Clock())
    one.on_turn(ENDED)
    assert value(other, "session_server_turns_total", outcome="stop") == 0


def test_a_log_line_stays_one_line_whatever_it_is_given() -> None:
    formatter = OneLineFormatter("%(message)s")
    record = logging.LogRecord("x", logging.INFO, "", 0, "a\x1b[31m\n%s", ("b\r\nc\u2028",), None)
    line = formatter.format(record)
    assert line.split() == ["a", "b", "c"]
    assert line.isprintable()
    try:
        raise ValueError("a\nb")
    except ValueError:
        import sys

        record = logging.LogRecord("x", logging.ERROR, "", 0, "bug", (), sys.exc_info())
    assert "\n" not in formatter.format(record)
    text = "a" * 10_000 + "the cause"
    long = logging.LogRecord("x", logging.INFO, "", 0, text, (), None)
    assert len(formatter.format(long)) == 4096
    assert formatter.format(long).endswith("aathe cause")


def test_events_worth_a_line_get_one(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test.events")
    log = EventLog(logger)
    with caplog.at_level(logging.DEBUG, logger="test.events"):
        log.on_event(SessionCooled(session_id=SessionId("s")))
        log.on_event(EngineDied(message="killed", will_restart=False))
        log.on_event(STATS)
        log.on_event(EngineStalled(stalled_s=1.6))
        log.on_event(EngineResumed())
        log.on_event(READY)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5
    assert "seconds=1.6" in lines[2]


def test_a_turn_gets_one_line_with_the_ids_that_its_client_knows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = TurnLog(logging.getLogger("t"))
    with caplog.at_level(logging.INFO, logger="t"):
        log.on_turn(ENDED)
        log.on_turn(dataclasses.replace(ENDED, timings=None, sent_s=None, reason="draining"))
        log.on_turn(dataclasses.replace(ENDED, status="failed", reason="numerical_error"))
    who = "session=s turn=t request=r"
    counts = "prompt=10 cached=7 output=2"
    assert caplog.messages == [
        f"turn finished {who} status=completed reason=stop {counts} submit_ms=500.0 "
        "queue_ms=1.0 ttft_ms=30.0 decode_ms=40.0 retractions=3",
        f"turn finished {who} status=completed reason=draining {counts} submit_ms=1000.0 "
        "queue_ms=0.0 ttft_ms=0.0 decode_ms=0.0 retractions=3",
        f"turn failed {who} code=numerical_error",
    ]


def test_on_a_terminal_lines_have_columns_and_only_our_colors() -> None:
    said = logging.LogRecord("x", logging.WARNING, "", 0, "a\x1b[31m turn=%s", ("b\nc=d",), None)
    plain = TerminalFormatter(is_colored=False).format(said)
    assert plain[8:] == " WARNING  a  turn=b c=d"
    assert plain.isprintable()
    colored = TerminalFormatter(is_colored=True).format(said)
    assert re.sub(r"\x1b\[\d+m", "", colored) == plain
    assert "\x1b[33mWARNING" in colored
    assert "\x1b[2mturn=\x1b[0mb" in colored
    assert "\x1b[31m" not in colored


@pytest.mark.parametrize(
    ("log_format", "is_terminal", "allows_color", "kind"),
    [
        ("text", True, True, TerminalFormatter),
        ("text", True, False, TerminalFormatter),
        ("text", False, True, OneLineFormatter),
        ("json", True, True, JsonFormatter),
    ],
)
def test_lines_are_laid_out_for_whoever_reads_them(
    monkeypatch: pytest.MonkeyPatch,
    *,
    log_format: Literal["text", "json"],
    is_terminal: bool,
    allows_color: bool,
    kind: type[logging.Formatter],
) -> None:
    ours, theirs = os.openpty() if is_terminal else os.pipe()
    with configured(), open(ours, "rb"), open(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        logger = configure_logging("info", log_format, allows_color=allows_color)
        (handler,) = logger.handlers
        assert type(handler.formatter) is kind
        logger.info("said turn=%s", "t")
        handler.flush()
        shown = os.read(ours, 4096)
    assert (b"\x1b[" in shown) is (kind is TerminalFormatter and allows_color)


@contextmanager
def configured() -> Iterator[None]:
    """Put the loggers back behind the block."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    try:
        yield
    finally:
        for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
            each.handlers[:] = handlers
            each.setLevel(level)
            each.propagate = propagate


def test_uvicorn_and_asyncio_speak_up_only_to_warn() -> None:
    with configured():
        logger = configure_logging("info")
        assert logger.isEnabledFor(logging.INFO)
        for name in ("uvicorn.error", "asyncio"):
            assert not logging.getLogger(name).isEnabledFor(logging.INFO)
            assert logging.getLogger(name).isEnabledFor(logging.WARNING)
