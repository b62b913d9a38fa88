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

from session_server.core.errors import WIRE_ERRORS, SessionServerError, wire_error
from session_server.core.session_events import TurnFailedEntry
from session_server.protocol.errors import (
    ErrorBody,
    ErrorResponse,
    error_body,
    internal_error_body,
    sanitize,
)
from session_server.protocol.frames import failure_body

JSON: Final = "application/json"
_RETRY_AFTER_S: Final = "1"
_CODES: Final[Mapping[int, str]] = {
    400: "bad_request",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "payload_too_large",
    415: "unsupported_media_type",
    421: "misdirected_request",
    426: "upgrade_not_supported",
    499: "client_closed_request",
    431: "headers_too_large",
    505: "http_version_not_supported",
}


class HttpRefusal(Exception):
    """Refuse a request before any route: framing, size, host, origin, media type."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(
            type="invalid_request_error",
            code=_CODES.get(status, "invalid_request"),
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
    return JsonResponse(ErrorResponse(error=failure_body(entry)), next(forms, 500))


def error_response(error: Exception) -> Response:
    """Return the response for an exception; an unexpected one shows no detail."""
    if isinstance(error, SessionServerError):
        form = wire_error(error)
        headers = {"retry-after": _RETRY_AFTER_S} if form.status in (429, 503) else {}
        if form.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return _response(error_body(error), form.status, headers)
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


def refusal_bytes(error: Exception) -> bytes:
    """Return the raw response of a request that no route sees; the connection then closes."""
    response = error_response(error)
    headers = [*response.raw_headers, (b"connection", b"close")]
    head = [b"HTTP/1.1 %d Refused" % response.status_code]
    head += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])


async def answer_error(_: Request, error: Exception) -> Response:
    """Handle an exception with `error_response`."""
    return error_response(error)


def _response(body: ErrorBody, status: int, headers: Mapping[str, str]) -> Response:
    return JsonResponse(ErrorResponse(error=body), status, dict(headers))


def _query_error(error: RequestValidationError) -> ErrorBody:
    first = error.errors()[0]
    return ErrorBody(
        type="invalid_request_error",
        code="invalid_request",
        message=sanitize(str(first.get("msg", "Invalid value."))),
        param=sanitize(".".join(str(part) for part in first.get("loc", ())[1:])) or None,
    )
