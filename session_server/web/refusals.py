"""Define refusals of the HTTP layer, and turn every refusal into a response."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from session_server.core.errors import (
    INTERNAL_ERROR,
    WIRE_ERRORS,
    SessionServerError,
    wire_error,
)
from session_server.core.origin import ORIGIN
from session_server.core.session_events import TurnFailedEntry
from session_server.protocol.errors import (
    HTTP_CODES,
    ErrorBody,
    ErrorResponse,
    error_body,
    internal_error_body,
    sanitize,
)
from session_server.protocol.frames import failure_body

JSON: Final = "application/json"


class HttpRefusal(Exception):
    """Refuse a request before any route: framing, size, host, origin, media type."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(
            type="invalid_request_error",
            code=HTTP_CODES.get(status, "invalid_request"),
            message=sanitize(message),
            param=param,
        )


class JsonResponse(Response):
    """Encode a response with msgspec: structs, dicts, plain values."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        """Return the JSON bytes of `content`."""
        return msgspec.json.encode(content)


def failure_response(entry: TurnFailedEntry) -> Response:
    """Return the response for a turn that failed; the status is 500 for an unknown code."""
    forms = (form.status for form in WIRE_ERRORS.values() if form.code == entry.code)
    body, status = failure_body(entry), next(forms, 500)
    return JsonResponse(ErrorResponse(error=body), status, _retry_after(body, status))


def error_response(error: Exception) -> Response:
    """Return the response for an exception; an unexpected one shows no detail."""
    if isinstance(error, SessionServerError):
        form, body = wire_error(error), error_body(error)
        headers = _retry_after(body, form.status)
        if form.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return _response(body, form.status, headers)
    if isinstance(error, HttpRefusal):
        return _response(error.body, error.status, {})
    if isinstance(error, RequestValidationError):
        return _response(_query_error(error), 400, {})
    if isinstance(error, HTTPException):
        message = HTTPStatus(error.status_code).phrase + "."
        if methods := (error.headers or {}).get("allow"):
            message = f"This path takes {methods}."
        refusal = HttpRefusal(error.status_code, message)
        return _response(refusal.body, error.status_code, dict(error.headers or {}))
    return _response(internal_error_body(), 500, {})


async def deny(websocket: WebSocket, error: Exception) -> None:
    """Refuse a handshake with the response for an exception."""
    websocket.app.state.services.metrics.count_refusal(refusal_code(error))
    await websocket.send_denial_response(error_response(error))


def refusal_code(error: Exception) -> str:
    """Return the code that an exception is told by."""
    if isinstance(error, SessionServerError):
        return wire_error(error).code
    return error.body.code if isinstance(error, HttpRefusal) else INTERNAL_ERROR.code


def refusal_bytes(error: Exception) -> bytes:
    """Return the raw response of a request that no route sees; the connection then closes."""
    response = error_response(error)
    headers = [*response.raw_headers, (b"connection", b"close")]
    head = [b"HTTP/1.1 %d Refused" % response.status_code]
    head += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])


def _retry_after(body: ErrorBody, status: int) -> dict[str, str]:
    """Return the header that says when the same can succeed; none where it cannot."""
    return {"retry-after": str(body.retry_after_s or 1)} if status in (429, 503) else {}


async def answer_error(_: Request, error: Exception) -> Response:
    """Handle an exception with `error_response`."""
    return error_response(error)


def _response(body: ErrorBody, status: int, headers: Mapping[str, str]) -> Response:
    if (origin := ORIGIN.get()) is not None:
        origin.refusal = body.code
    return JsonResponse(ErrorResponse(error=body), status, dict(headers))


def _query_error(error: RequestValidationError) -> ErrorBody:
    first = error.errors()[0]
    return ErrorBody(
        type="invalid_request_error",
        code="invalid_request",
        message=sanitize(str(first.get("msg", "Invalid value."))),
        param=sanitize(".".join(str(part) for part in first.get("loc", ())[1:])) or None,
    )
