"""A log that nobody reads stops nothing, and says afterwards what it lost."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import threading

import pytest

from session_server import serving
from session_server.config import HttpOptions, Settings
from session_server.core.events import EngineDied, EngineStats
from session_server.metrics import log_handler
from session_server.metrics.log_handler import NonBlockingHandler, RepeatFilter
from session_server.metrics.logging import JsonFormatter
from session_server.metrics.prometheus import ServerMetrics
from session_server.metrics.throughput import ThroughputLog
from tests.engine_stats import engine_stats


class Gate(io.StringIO):
    """A stream whose first write waits until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = threading.Event()
        self.has_begun = threading.Event()

    def write(self, text: str) -> int:
        self.has_begun.set()
        assert self.is_open.wait(30)
        return super().write(text)


def record(message: str, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("x", level, "", 0, message, args, None)


def test_lines_are_written_in_order() -> None:
    stream = io.StringIO()
    handler = NonBlockingHandler(stream)
    for number in range(100):
        handler.emit(record("line %d", number))
    handler.flush()
    assert stream.getvalue().splitlines() == [f"line {number}" for number in range(100)]


def test_lines_beyond_the_bound_are_dropped_and_counted() -> None:
    stream = Gate()
    handler = NonBlockingHandler(stream, max_bytes=30)
    handler.emit(record("123456789"))
    assert stream.has_begun.wait(30)
    for line in ("123456789", "12345678", "x", "y"):  # 29 bytes with the first; 2 more; 2 more
        handler.emit(record(line))
    stream.is_open.set()
    handler.flush()
    handler.emit(record("later"))
    handler.flush()
    assert stream.getvalue().splitlines() == [
        "123456789",
        "123456789",
        "12345678",
        "2 log lines were dropped: they could not be written in time",
        "later",
    ]


def test_as_many_bytes_as_may_wait_do_wait() -> None:
    stream = Gate()
    handler = NonBlockingHandler(stream, max_bytes=30)
    handler.emit(record("123456789"))
    assert stream.has_begun.wait(30)
    handler.emit(record("x" * 19))
    stream.is_open.set()
    handler.flush()
    assert stream.getvalue().splitlines() == ["123456789", "x" * 19]


def test_a_pipe_that_nobody_reads_keeps_nobody_waiting() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(writer, "w") as stream, os.fdopen(reader) as log:
        handler = NonBlockingHandler(stream, max_bytes=10_000)
        for number in range(5_000):
            handler.emit(record("bad request %d", number))
        lines: list[str] = []
        while not any("dropped" in line for line in lines):
            lines.append(log.readline())
            if len(lines) == 100:
                handler.emit(record("another one"))
        handler.flush()
    assert lines[0] == "bad request 0\n"


def test_a_stream_that_is_closed_ends_the_writer_and_nothing_else() -> None:
    stream = io.StringIO()
    stream.close()
    handler = NonBlockingHandler(stream, max_bytes=100)
    for _ in range(50):
        handler.emit(record("nobody hears this"))


class Disk(io.StringIO):
    """A stream that takes nothing while it is full."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_log_on_a_full_disk_goes_on_when_there_is_room_again() -> None:
    stream = Disk()
    handler = NonBlockingHandler(stream, max_bytes=100)
    for _ in range(50):
        handler.emit(record("nobody reads this"))
        handler.flush()
    stream.is_full = False
    handler.emit(record("later"))
    handler.flush()
    assert stream.getvalue().splitlines() == [
        "later",
        "50 log lines were dropped: they could not be written in time",
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(log_handler.time, "monotonic", lambda: now_s[0])
    return now_s


def test_few_warnings_of_one_kind_are_shown_in_a_second(clock: list[float]) -> None:
    alike = RepeatFilter(max_per_s=3)
    warnings = [record("turn failed %d", n, level=logging.WARNING) for n in range(9)]
    assert [alike.filter(warning) for warning in warnings] == [True] * 3 + [False] * 6
    assert alike.filter(record("another", level=logging.WARNING)), "of another kind"
    assert all(alike.filter(record("turn finished")) for _ in range(9)), "no warning"
    clock[0] += 1.0
    after = record("turn failed %d", 9, level=logging.WARNING)
    assert alike.filter(after)
    assert after.getMessage() == "turn failed 9 (6 more like this were not shown)"


def test_kinds_of_warnings_are_bounded(clock: list[float]) -> None:
    alike = RepeatFilter(max_per_s=1)
    for number in range(10_000):
        assert alike.filter(record(f"made up {number}", level=logging.WARNING))
    assert len(alike._seen) <= log_handler._KINDS_KEPT + 1


def test_a_line_as_json_has_the_fields_that_its_message_names() -> None:
    said = record("turn failed session=%s code=%s ttft_ms=%.1f n=%d", "s\n", "c", 1.23456, 7)
    line = json.loads(JsonFormatter().format(said))
    assert line["time"].endswith("+00:00")
    assert {key: line[key] for key in line if key != "time"} == {
        "level": "info",
        "logger": "x",
        "message": "turn failed",
        "session": "s ",
        "code": "c",
        "ttft_ms": 1.235,
        "n": 7,
    }


def test_a_line_as_json_is_one_line_whatever_it_says() -> None:
    said = record("the engine was given up: %s", "a\nb")
    assert json.loads(JsonFormatter().format(said))["message"] == "the engine was given up: a b"
    try:
        raise ValueError("x\ny" * 9999)
    except ValueError as error:
        said.exc_info = (ValueError, error, error.__traceback__)
    line = JsonFormatter().format(said)
    assert "\n" not in line
    assert "ValueError" in json.loads(line)["exception"]
    assert len(line) < 10_000


def sample(
    *, prompt: int = 0, cached: int = 0, generated: int = 0, running: int = 1
) -> EngineStats:
    return engine_stats(
        sessions=2,
        prompt_tokens=prompt,
        cached_tokens=cached,
        generated_tokens=generated,
        running=running,
    )


def test_throughput_is_told_per_interval_of_work(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    logger = logging.getLogger("test.throughput")
    log = ThroughputLog(logger, interval_s=10.0, now_s=lambda: now_s)
    with caplog.at_level(logging.INFO, logger="test.throughput"):
        log.on_event(sample())
        now_s = 9.9
        log.on_event(sample(generated=50))
        assert caplog.messages == []
        now_s = 10.0
        log.on_event(sample(prompt=100, cached=75, generated=100, running=0))
        expected = "output_per_s=10.0 input_per_s=2.5 cached_share=0.75 running=0 waiting=0"
        assert caplog.messages == [f"throughput {expected} sessions=2"]
        now_s = 500.0
        log.on_event(sample(prompt=100, cached=75, generated=100))
        now_s = 510.0
        log.on_event(sample(prompt=100, cached=75, generated=300))
        assert "output_per_s=20.0" in caplog.messages[1], "rest does not count"
        log.on_event(EngineDied(message="killed", will_restart=True))
        now_s = 530.0
        log.on_event(sample())
        assert len(caplog.messages) == 2, "a new engine counts from zero"


@pytest.mark.parametrize("shown_s", [0.0, 0.05])
def test_turns_shorter_than_a_sample_are_told_per_second_of_the_clock(
    caplog: pytest.LogCaptureFixture, shown_s: float
) -> None:
    """The engine samples once a second of work and when the last turn it has shown has ended."""
    now_s = 0.0
    log = ThroughputLog(logging.getLogger("t"), interval_s=10.0, now_s=lambda: now_s)
    with caplog.at_level(logging.INFO, logger="t"):
        for second in range(21):
            now_s = float(second)
            log.on_event(sample(generated=40 * second, running=int(shown_s > 0.0)))
            if shown_s:
                now_s += shown_s
                log.on_event(sample(generated=40 * second, running=0))
        now_s += 500.0
        log.on_event(sample(generated=801))
    assert [line.split()[:2] for line in caplog.messages] == [
        ["throughput", "output_per_s=40.0"]
    ] * 2


def test_a_rest_does_not_count_as_time_of_work(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = ThroughputLog(logging.getLogger("t"), interval_s=4.0, now_s=lambda: now_s)
    with caplog.at_level(logging.INFO, logger="t"):
        for at_s, generated in ((0.0, 0), (2.0, 20), (4.1, 21), (100.0, 22), (102.0, 40)):
            now_s = at_s
            log.on_event(sample(generated=generated, running=0))
    assert [line.split()[:2] for line in caplog.messages] == [["throughput", "output_per_s=10.0"]]


def test_no_throughput_is_told_without_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = ThroughputLog(logging.getLogger("t"), interval_s=0.0, now_s=lambda: now_s)
    for generated in range(100):
        now_s += 1.0
        log.on_event(sample(generated=generated))
    assert caplog.messages == []


def test_a_server_tells_its_throughput_as_often_as_it_is_told_to(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(http=HttpOptions(throughput_interval_s=5.0))
    metrics = ServerMetrics(now_s=lambda: clock[0])
    observers = serving._observers(settings, metrics)
    with caplog.at_level(logging.INFO, logger="session_server"):
        for generated in (0, 20, 40):
            for observe in observers:
                observe(sample(generated=generated))
            clock[0] += 2.5
    assert [line.split()[:2] for line in caplog.messages] == [["throughput", "output_per_s=8.0"]]
