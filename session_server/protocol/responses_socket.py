"""Run the WebSocket mode of OpenAI's Responses without a socket: frames to requests, and back.

A client makes responses in lanes, which it names: those of one lane come one after the other, those
of different lanes side by side. Like every protocol here it never raises because of what the peer
sends: what is wrong is answered with an error, in the envelope that these clients expect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from session_server.core.errors import (
    WIRE_ERRORS,
    InvalidRequest,
    InvalidStreamId,
    SessionServerError,
    StreamLimitReached,
    UnsupportedOperation,
    wire_error,
)
from session_server.protocol.errors import ErrorBody, error_body, to_invalid_request
from session_server.protocol.frame_queue import FrameQueue
from session_server.protocol.messages import doc
from session_server.protocol.response_events import ResponseEvent
from session_server.protocol.responses import ResponseFields, ResponseId

MAX_STREAMS: Final = 32
"""Names of lanes on one connection."""

_STREAM_ID: Final = re.compile(r"[A-Za-z0-9_.\-]{1,256}", re.ASCII)


class ResponseCreate(
    ResponseFields, frozen=True, kw_only=True, tag_field="type", tag="response.create"
):
    """Make a response, with the fields of `POST /v1/responses`."""

    stream_id: Annotated[
        Any, doc("the lane: 1 to 256 letters, digits, `_`, `-` and `.`; none: that without a name")
    ] = None
    background: Annotated[bool, doc("not offered here")] | None = None


class ResponseCancel(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="response.cancel"
):
    """Cancel a response that runs on this connection; without an id, that of the lane."""

    response_id: ResponseId | None = None
    stream_id: Any = None


class ResponseSteer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="response.steer"
):
    """Change a response while it runs; not offered."""

    input: Any = ""
    previous_response_id: Annotated[str, Meta(max_length=256)] = ""
    stream_id: Any = None


SocketMessage = ResponseCreate | ResponseCancel | ResponseSteer


class SteerBody(msgspec.Struct, frozen=True, kw_only=True):
    """What was to change a response."""

    input: Any
    previous_response_id: str


class SteerError(msgspec.Struct, frozen=True, kw_only=True):
    """Why it did not."""

    code: Literal["steering_not_supported"] = "steering_not_supported"
    message: str = "Steering is not supported here: cancel, and make another response."
    type: Literal["invalid_request_error"] = "invalid_request_error"


class SteerFailed(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="response.steer.failed"
):
    """The answer to every attempt."""

    sequence_number: int = 0
    error: SteerError = SteerError()
    steer: SteerBody
    stream_id: str | msgspec.UnsetType = msgspec.UNSET


class SocketError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """A refusal. The connection stays open."""

    status: int
    stream_id: str | msgspec.UnsetType = msgspec.UNSET
    error: Any


class _Envelope(msgspec.Struct):
    stream_id: Any = None
    previous_response_id: Any = None


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """Say that a request was refused, whose lane and previous response are these, if it had
    any."""

    stream_id: str | None
    previous_response_id: str | None


SocketRequest = ResponseCreate | ResponseCancel | RefusedRequest


class ResponsesProtocol(FrameQueue):
    """Hold the protocol state of one connection, and the frames to send on it."""

    def __init__(self, *, max_message_bytes: int) -> None:
        super().__init__()
        self._max_message_bytes = max_message_bytes
        self._streams: set[str] = set()

    def receive_frame(self, frame: str) -> SocketRequest | None:
        """Process one text frame; never raises. Return what the client requests, if anything."""
        # A character takes at least one byte: reject a frame of too many before decoding it.
        if len(frame) > self._max_message_bytes:
            self.send_error(InvalidRequest("The message is too big."))
            return None
        try:
            message: SocketMessage = msgspec.json.decode(frame, type=SocketMessage)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return self._refuse(to_invalid_request(error, SocketMessage), _envelope_of(frame))
        try:
            self._check(message)
        except InvalidRequest as error:
            return self._refuse(error, message)
        if isinstance(message, ResponseSteer):
            self._note_refusal(WIRE_ERRORS[UnsupportedOperation].code)
            self._send(
                SteerFailed(
                    steer=SteerBody(
                        input=message.input if isinstance(message.input, str) else [],
                        previous_response_id=message.previous_response_id,
                    ),
                    stream_id=message.stream_id or msgspec.UNSET,
                )
            )
            return None
        return message

    def send_event(self, event: ResponseEvent) -> None:
        """Queue an event of a response."""
        self._send(event)

    def send_error(self, error: SessionServerError, *, stream_id: str | None = None) -> None:
        """Queue an error about a lane."""
        status = wire_error(error).status
        told = error_body(error)
        self._note_refusal(told.code)
        body: ErrorBody | dict[str, Any] = told
        if status in (429, 503):
            headers = {"retry-after": str(told.retry_after_s or 1)}
            body = {**msgspec.to_builtins(told), "headers": headers}
        lane = msgspec.UNSET if stream_id is None else stream_id
        self._send(SocketError(status=status, stream_id=lane, error=body))

    def _check(self, message: SocketMessage) -> None:
        """Raise InvalidRequest for what this mode does not take."""
        name = message.stream_id
        if name is not None and not _is_stream_id(name):
            raise InvalidStreamId(
                "The 'stream_id' field must be a non-empty string with at most 256 characters and "
                "may only contain letters, numbers, underscores, hyphens, and periods.",
                param="stream_id",
            )
        if not isinstance(message, ResponseCreate):
            return
        if name is not None and name not in self._streams:
            if len(self._streams) >= MAX_STREAMS:
                raise StreamLimitReached(
                    "This WebSocket connection has reached its maximum number of distinct stream "
                    f"IDs ({MAX_STREAMS}). Use one of them, or another connection.",
                    param="stream_id",
                )
            self._streams.add(name)
        if message.background:
            raise UnsupportedOperation(
                "background is not supported on a WebSocket.", param="background"
            )

    def _refuse(self, error: InvalidRequest, about: _Envelope | SocketMessage) -> RefusedRequest:
        name = about.stream_id if _is_stream_id(about.stream_id) else None
        self.send_error(error, stream_id=name)
        previous = getattr(about, "previous_response_id", None)
        return RefusedRequest(name, previous if isinstance(previous, str) else None)


def _is_stream_id(name: object) -> bool:
    return isinstance(name, str) and _STREAM_ID.fullmatch(name) is not None


def _envelope_of(frame: str) -> _Envelope:
    """Return what can be read of a frame that was refused."""
    try:
        return msgspec.json.decode(frame, type=_Envelope)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Envelope()
