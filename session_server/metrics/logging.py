"""Log lines: one per event, `key=value`, never more than one line.

Lines hold ids, lengths, counts and timings. Prompts, texts, tokens, keys and query strings are
never passed in, and whatever is passed in loses its control characters, so that no client can
forge a line or colour a terminal.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Final

from session_server.core.events import (
    EngineDied,
    EngineEvent,
    EngineReady,
    EngineResumed,
    EngineStalled,
    SessionCooled,
    TurnFailed,
    TurnFinished,
)

LOGGER_NAME: Final = "session_server"
MAX_LINE_CHARS: Final = 4096
_CONTROL: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class OneLineFormatter(logging.Formatter):
    """A formatter whose output is one bounded line, exceptions included."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        return strip_control(super().format(record))[:MAX_LINE_CHARS]


class EventLog:
    """Writes what the engine tells to the log."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def on_event(self, event: EngineEvent) -> None:
        """Log one engine event, when it is worth a line."""
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
                    "engine died restart=%s message=%s", event.will_restart, event.message
                )
            case EngineStalled():
                self._logger.warning("engine stalled seconds=%.1f", event.stalled_s)
            case EngineResumed():
                self._logger.warning("engine resumed")
            case TurnFinished():
                self._finished(event)
            case TurnFailed():
                self._logger.warning(
                    "turn failed session=%s turn=%s code=%s",
                    event.session_id,
                    event.turn_id,
                    event.code,
                )
            case SessionCooled():
                self._logger.debug("session cooled session=%s", event.session_id)
            case _:
                pass

    def _finished(self, event: TurnFinished) -> None:
        timings = event.timings
        self._logger.info(
            "turn finished session=%s turn=%s reason=%s prompt=%d cached=%d output=%d "
            "queue_ms=%.1f ttft_ms=%.1f decode_ms=%.1f retractions=%d",
            event.session_id,
            event.turn_id,
            event.reason.value,
            event.prompt_tokens,
            event.cached_tokens,
            event.num_outputs,
            timings.queue_ms,
            timings.ttft_ms,
            timings.decode_ms,
            event.num_retractions,
        )


def configure_logging(level: str) -> logging.Logger:
    """Send our lines and uvicorn's warnings to stderr; returns our logger.

    uvicorn's own lines below a warning stay off: one of them names the query string of each
    accepted WebSocket.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger(LOGGER_NAME)
    for name, threshold in ((LOGGER_NAME, level.upper()), ("uvicorn", "WARNING")):
        target = logging.getLogger(name)
        target.handlers[:] = [handler]
        target.setLevel(threshold)
        target.propagate = False
    return logger


def strip_control(text: str) -> str:
    """`text` on one line, without terminal escapes."""
    return _CONTROL.sub(" ", text)
