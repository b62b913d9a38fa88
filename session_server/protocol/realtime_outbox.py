"""Number the events of a Realtime conversation, and keep them for its peer if there is one.

Numbers go on over connections. An event's id says what a client that names it has seen: the number
and, while the conversation is answered, how many characters of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from session_server.core.errors import (
    WIRE_ERRORS,
    ContextLengthExceeded,
    ContextTooLong,
    InvalidRequest,
    SessionServerError,
    wire_error,
)
from session_server.protocol.errors import sanitize
from session_server.protocol.frame_queue import MAX_OUTBOX_FRAMES, FrameQueue
from session_server.protocol.realtime_frames import RealtimeError, RealtimeErrorBody, RealtimeFrame

_INVALID: Final = WIRE_ERRORS[InvalidRequest].code
_EVENT_ID: Final = re.compile(r"event_(\d{1,16})(?:_(\d{1,16}))?", re.ASCII)


class RealtimeRefusal(Exception):
    """Refuse an event of the client under one of OpenAI's codes."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class EventMark:
    """Say how much a client has seen: the number of an event, and characters of an answer."""

    number: int = -1
    num_chars: int = 0


class RealtimeQueue(FrameQueue):
    """Hold the events that wait for one peer."""

    @property
    def is_full(self) -> bool:
        """Return whether so much waits for the peer that nothing more may be received."""
        return super().is_full or len(self._outbox) >= MAX_OUTBOX_FRAMES

    def put(self, frame: RealtimeFrame) -> None:
        """Add an event."""
        self._send(frame)


class RealtimeOutbox:
    """Number the events of a conversation, and put them into the queue of its peer."""

    def __init__(self) -> None:
        self._number = 0
        self._queue: RealtimeQueue | None = None
        self.has_extensions = False
        """Whether the client hears events that OpenAI does not know."""
        self.num_chars = 0
        """Characters told of the answer that the conversation waits for."""
        self.on_refusal: Callable[[str], None] | None = None
        """Told the wire code of each refusal, once the peer is let in."""

    def attach(self) -> RealtimeQueue:
        """Return the queue that gets the events from now on."""
        self._queue = RealtimeQueue()
        return self._queue

    def detach(self) -> None:
        """Number events from now on without keeping them: the peer is gone."""
        self._queue = None

    def mark_of(self, event_id: str | None) -> EventMark:
        """Return what a client has seen that names an event; nothing if there was none such."""
        found = _EVENT_ID.fullmatch(event_id or "")
        if found is None or int(found[1]) > self._number:
            return EventMark()
        return EventMark(int(found[1]), int(found[2] or 0))

    def emit(self, kind: type[RealtimeFrame], **fields: Any) -> int:
        """Send an event; return its number."""
        self._number += 1
        if self._queue is not None:
            chars = f"_{self.num_chars}" if self.num_chars else ""
            self._queue.put(kind(event_id=f"event_{self._number}{chars}", **fields))
        return self._number

    def refuse(self, error: RealtimeRefusal | SessionServerError, event_id: str | None) -> None:
        """Tell that an event of the client had no effect."""
        if self.on_refusal is not None:
            if isinstance(error, RealtimeRefusal):
                self.on_refusal(_INVALID)
            else:
                self.on_refusal(wire_error(error).code)
        self.tell(error, event_id)

    def tell(self, error: RealtimeRefusal | SessionServerError, event_id: str | None) -> None:
        """Tell of an error that refuses nothing, or that was counted as a refusal."""
        kind, code = "invalid_request_error", ""
        match error:
            case RealtimeRefusal():
                code = error.code
            case ContextTooLong():
                code = wire_error(ContextLengthExceeded(error.message)).code
            case SessionServerError():
                form = wire_error(error)
                kind, code = form.kind, form.code
                if type(error) is InvalidRequest:
                    code = "invalid_value"
        body = RealtimeErrorBody(
            type=kind,
            code=code,
            message=sanitize(error.message),
            param=error.param,
            event_id=None if event_id is None else sanitize(event_id),
        )
        self.emit(RealtimeError, error=body)
