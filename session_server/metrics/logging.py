"""Format log lines: one per event, `key=value` or JSON, never more than one line.

Lines hold ids, lengths, counts and timings, never prompts, texts, tokens, keys or query strings.
Control characters are removed, so that no client can forge a line or color a terminal.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Final, Literal

from session_server.core.events import (
    EngineDied,
    EngineEvent,
    EngineReady,
    EngineResumed,
    EngineStalled,
    SessionCooled,
    TurnTimings,
)
from session_server.core.turn_report import TurnReport
from session_server.metrics.log_handler import NonBlockingHandler, RepeatFilter

LOGGER_NAME: Final = "session_server"
LOGGERS: Final = (LOGGER_NAME, "uvicorn", "asyncio", "opentelemetry")
"""Loggers whose lines are shown."""

MAX_LINE_CHARS: Final = 4096
_FIELD: Final = re.compile(r" ?\b([a-z_]+)=%[-+0-9.]*[a-z]")
_KEY: Final = re.compile(r"(?<= )([a-z_]+=)")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_COLORS: Final = {
    logging.INFO: "\x1b[32m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[31m",
}
_CONTROL: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class OneLineFormatter(logging.Formatter):
    """Format a record as one bounded line, exceptions included."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        return bounded(strip_control(super().format(record)))


class TerminalFormatter(logging.Formatter):
    """Format a record for somebody who watches: time and level in columns, names of fields dim.

    Only what is written here colors the terminal; escapes in a message are removed before.
    """

    def __init__(self, *, is_colored: bool) -> None:
        super().__init__()
        self._is_colored = is_colored

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        text = bounded(strip_control(super().format(record)))
        at = self.formatTime(record, "%H:%M:%S")
        if not self._is_colored:
            return f"{at} {record.levelname:<8} {text}"
        color = _COLORS.get(record.levelno, _DIM)
        text = _KEY.sub(rf"{_DIM}\1{_PLAIN}", text)
        return f"{_DIM}{at}{_PLAIN} {color}{record.levelname:<8}{_PLAIN} {text}"


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object.

    It has time, level, logger, message, and the fields that our messages name as `key=value`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": bounded(strip_control(record.getMessage())),
        }
        names = _FIELD.findall(str(record.msg))
        if isinstance(record.args, tuple) and len(names) == len(record.args):
            line["message"] = strip_control(_FIELD.sub("", str(record.msg))).strip()
            line |= {name: _plain(value) for name, value in zip(names, record.args, strict=True)}
        if record.exc_info:
            stack = self.formatException(record.exc_info)
            line["exception"] = bounded(strip_control(stack))
        return json.dumps(line)


class EventLog:
    """Log engine events."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def on_event(self, event: EngineEvent) -> None:
        """Log one engine event if it deserves a line."""
        match event:
            case EngineReady():
                self._logger.info(
                    "engine ready epoch=%d device=%s dtype=%s backend=%s context=%d pages=%d",
                    event.epoch,
                    event.device,
                    event.dtype,
                    event.backend,
                    event.max_turn_len,
                    event.num_pages,
                )
            case EngineDied():
                self._logger.error(
                    "engine died restart=%s detail=%s", event.will_restart, event.message
                )
            case EngineStalled():
                self._logger.warning("engine stalled seconds=%.1f", event.stalled_s)
            case EngineResumed():
                self._logger.warning("engine resumed")
            case SessionCooled():
                self._logger.debug("session cooled session=%s", event.session_id)
            case _:
                pass


class TurnLog:
    """Log every turn that has ended, by the ids that its client knows."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def on_turn(self, record: TurnReport) -> None:
        """Log one turn."""
        request_id = "-" if record.origin is None else record.origin.request_id
        if record.status == "failed":
            self._logger.warning(
                "turn failed session=%s turn=%s request=%s code=%s",
                *(record.session_id, record.turn_id, request_id, record.reason),
            )
            return
        usage, timings = record.usage, record.timings
        submitted_s = record.ended_s if record.sent_s is None else record.sent_s
        self._logger.info(
            "turn finished session=%s turn=%s request=%s status=%s reason=%s prompt=%d cached=%d "
            "output=%d submit_ms=%.1f queue_ms=%.1f ttft_ms=%.1f decode_ms=%.1f retractions=%d",
            *(record.session_id, record.turn_id, request_id, record.status, record.reason),
            *(usage.input_tokens, usage.cached_tokens, usage.output_tokens),
            (submitted_s - record.asked_s) * 1e3,
            *((0.0,) * 3 if timings is None else _times_of(timings)),
            record.num_retractions,
        )


def _times_of(timings: TurnTimings) -> tuple[float, float, float]:
    return timings.queue_ms, timings.ttft_ms, timings.decode_ms


def configure_logging(
    level: str, log_format: Literal["text", "json"] = "text", *, allows_color: bool = True
) -> logging.Logger:
    """Send our lines, and warnings of what we run on, to stderr; return our logger.

    Text is laid out for people where stderr is a terminal, in color if that is allowed.

    uvicorn's lines below a warning are dropped: one of them shows the query string of every
    accepted WebSocket.
    """
    handler = NonBlockingHandler(sys.stderr)
    handler.addFilter(RepeatFilter())
    formatter: logging.Formatter = JsonFormatter()
    if log_format == "text" and sys.stderr.isatty():
        formatter = TerminalFormatter(is_colored=allows_color)
    elif log_format == "text":
        formatter = OneLineFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(formatter)
    for name in LOGGERS:
        target = logging.getLogger(name)
        target.handlers[:] = [handler]
        target.setLevel(level.upper() if name == LOGGER_NAME else "WARNING")
        target.propagate = False
    return logging.getLogger(LOGGER_NAME)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return round(value, 3)
    return value if isinstance(value, int) else strip_control(str(value))[:MAX_LINE_CHARS]


def strip_control(text: str) -> str:
    """Return `text` on one line, without terminal escapes."""
    return _CONTROL.sub(" ", text)


def bounded(text: str) -> str:
    """Return `text` without its middle if it is too long: the cause of an exception comes last."""
    if len(text) <= MAX_LINE_CHARS:
        return text
    head, gap = text[: MAX_LINE_CHARS // 4], " ... "
    return head + gap + text[len(head) + len(gap) - MAX_LINE_CHARS :]
