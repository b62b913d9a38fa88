"""Everything the server refuses on purpose, and its one form on the wire.

`WIRE_ERRORS` maps each to a code, an HTTP status and whether retrying helps; a test keeps it total.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


class SessionServerError(Exception):
    """Base of all errors. `message` goes to the client, so it holds no prompt, key or path."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(SessionServerError):
    """Malformed or out of bounds; `param` names the field."""


class UnsupportedOperation(InvalidRequest):
    """Well-formed, but this session or server cannot do it."""


class ContextTooLong(InvalidRequest):
    """The context cannot fit the model or the pool."""


class ContextLengthExceeded(ContextTooLong):
    """The same, as OpenAI's clients expect it on OpenAI's routes."""


class TokenizeFailed(InvalidRequest):
    """The tokenizer or the chat template could not take the input."""


class Unauthorized(SessionServerError):
    """No or wrong credentials."""


class SessionNotFound(SessionServerError):
    """No such session, or another owner's; the two look alike."""


class SessionExists(SessionServerError):
    """The session id is taken."""


class SessionClosing(SessionServerError):
    """Close was requested for the session."""


class SessionMoved(SessionServerError):
    """The session goes on in another replica."""


class UnknownModel(SessionServerError):
    """This server serves another model."""


class ItemNotFound(SessionServerError):
    """No such item in this session."""


class ConversationNotFound(SessionServerError):
    """No such conversation: deleted, dropped, or another owner's."""


class ResponseNotFound(SessionServerError):
    """No such response: never stored, deleted, dropped, or another owner's."""


class PreviousResponseNotFound(InvalidRequest):
    """The response to go on from is not kept, or its conversation is gone."""


class InvalidStreamId(InvalidRequest):
    """The name of a lane of a WebSocket of responses is none."""


class StreamLimitReached(InvalidRequest):
    """A WebSocket of responses has as many lanes as it may have."""


class TurnNotFound(SessionServerError):
    """No such turn in this session."""


class TurnConflict(SessionServerError):
    """The turn id was used before with another body."""


class SessionBusy(SessionServerError):
    """A turn is running and the session's queue is full."""


class TurnNotActive(SessionServerError):
    """The turn has already ended."""


class QuotaExceeded(SessionServerError):
    """Too many sessions, turns, tokens or bytes for this tenant.

    `retry_after_s`: after how many seconds the same can succeed; None where that is not known.
    """

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class ServerBusy(SessionServerError):
    """The server cannot take more now."""


class ServerDraining(SessionServerError):
    """The server is shutting down."""


class EngineUnavailable(SessionServerError):
    """There is no engine at the moment."""

    is_final = False  # True if the settings allow none


class EngineRestarting(SessionServerError):
    """The engine died under this turn; the session is intact."""


class GrammarFailed(SessionServerError):
    """The grammar of this turn became too complex in the middle of its answer."""


class NumericalError(SessionServerError):
    """NaN or Inf in this turn's logits."""


class InternalInconsistency(SessionServerError):
    """The memory checker found this turn's KV wrong; it was dropped."""


class DeviceFailed(SessionServerError):
    """The device refused the forward."""


@dataclass(frozen=True, slots=True)
class WireError:
    """Describe how an error looks to clients. `kind` is the `type` field of the body."""

    code: str
    status: int
    retryable: bool
    kind: str = "invalid_request_error"


_SERVER: Final = "server_error"

WIRE_ERRORS: Final[Mapping[type[SessionServerError], WireError]] = {
    InvalidRequest: WireError("invalid_request", 400, retryable=False),
    UnsupportedOperation: WireError("unsupported_operation", 400, retryable=False),
    ContextTooLong: WireError("context_too_long", 422, retryable=False),
    ContextLengthExceeded: WireError("context_length_exceeded", 400, retryable=False),
    TokenizeFailed: WireError("tokenize_failed", 400, retryable=False),
    Unauthorized: WireError("unauthorized", 401, retryable=False, kind="authentication_error"),
    SessionNotFound: WireError("session_not_found", 404, retryable=False),
    SessionExists: WireError("session_exists", 409, retryable=False),
    SessionClosing: WireError("session_closing", 409, retryable=False),
    SessionMoved: WireError("session_moved", 409, retryable=True),
    UnknownModel: WireError("model_not_found", 404, retryable=False),
    ItemNotFound: WireError("item_not_found", 404, retryable=False),
    ConversationNotFound: WireError("conversation_not_found", 404, retryable=False),
    ResponseNotFound: WireError("response_not_found", 404, retryable=False),
    PreviousResponseNotFound: WireError("previous_response_not_found", 400, retryable=False),
    InvalidStreamId: WireError("invalid_stream_id", 400, retryable=False),
    StreamLimitReached: WireError("websocket_stream_limit_reached", 400, retryable=False),
    TurnNotFound: WireError("turn_not_found", 404, retryable=False),
    TurnConflict: WireError("turn_conflict", 409, retryable=False),
    SessionBusy: WireError("session_busy", 409, retryable=True),
    TurnNotActive: WireError("turn_not_active", 409, retryable=False),
    QuotaExceeded: WireError("quota_exceeded", 429, retryable=True, kind="rate_limit_error"),
    ServerBusy: WireError("server_busy", 503, retryable=True, kind=_SERVER),
    ServerDraining: WireError("server_draining", 503, retryable=True, kind=_SERVER),
    EngineUnavailable: WireError("engine_unavailable", 503, retryable=True, kind=_SERVER),
    EngineRestarting: WireError("engine_restarting", 503, retryable=True, kind=_SERVER),
    GrammarFailed: WireError("grammar_failed", 400, retryable=False),
    NumericalError: WireError("numerical_error", 500, retryable=True, kind=_SERVER),
    InternalInconsistency: WireError("internal_inconsistency", 500, retryable=True, kind=_SERVER),
    DeviceFailed: WireError("device_failed", 500, retryable=True, kind=_SERVER),
}

INTERNAL_ERROR: Final = WireError("internal_error", 500, retryable=False, kind=_SERVER)
"""The wire form of a bug in the server: it gives no detail."""


def wire_error(error: SessionServerError) -> WireError:
    """Return the wire form of an error, by its class."""
    return WIRE_ERRORS[type(error)]
