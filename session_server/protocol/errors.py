"""Build error bodies, the same on every surface: `{"error": {type, code, message, param}}`.

On a WebSocket the same body is in an `error` frame, with the `turn_id` it is about. Messages are
cut to `MAX_MESSAGE_CHARS` and contain no control characters, so that they stay on one line in a log
or a terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from session_server.core.errors import (
    INTERNAL_ERROR,
    WIRE_ERRORS,
    InvalidRequest,
    QuotaExceeded,
    SessionServerError,
    wire_error,
)
from session_server.protocol.schema import unknown_field_hint, values_at

MAX_MESSAGE_CHARS: Final = 512
_MAX_SHOWN_CHARS: Final = 64
"""Of a name that there is not: a hint stands behind it."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_WRONG_VALUE: Final = re.compile(r"(?s)Invalid (?:enum )?value (.*)")
_WRONG_PATTERN: Final = re.compile(
    r"Expected `str` matching regex '\^\[(.*)\]\{(\d+),(\d+)\}\$\(\?!\\+n\)'"
)
_WRONG_FIELD: Final = re.compile(r"(?s)Object (contains unknown|missing required) field `(.*)`$")
_JSON_TYPES: Final = re.compile(r"`(\w+(?: \| \w+)*)`")
_JSON_BOUND: Final = re.compile(r"( of length)? (>=|<=|>|<) (?=-?\d)")
_PLAIN: Final[Mapping[str, str]] = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "null",
    "object": "an object",
    "str": "a string",
    ">=": "at least",
    "<=": "at most",
    ">": "above",
    "<": "below",
}
"""The decoder's words, in those of its users."""

_MSGSPEC_PATH: Final = re.compile(r"(?s)(.*) - at `(?:key` in `)?\$?\.?(.*)`$")


_QUOTA: Final = WIRE_ERRORS[QuotaExceeded].code

HTTP_CODES: Final[Mapping[int, str]] = {
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
"""Codes of refusals that no `SessionServerError` stands for, by status."""


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error. `code` is stable and for programs, `message` for people. `retry_after_s`, of
    `quota_exceeded`: seconds after which the same can succeed, 1 where that is not known."""

    type: str
    code: str
    message: str
    param: str | None
    turn_id: str | None = None
    retry_after_s: int | None = None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every HTTP answer that is not a success."""

    error: ErrorBody


def sanitize(text: str) -> str:
    """Return `text` on one line, without control characters, cut to `MAX_MESSAGE_CHARS`."""
    return _CONTROL.sub(" ", text)[:MAX_MESSAGE_CHARS]


def wait_of(code: str, wait_s: float | None) -> int | None:
    """Return the whole seconds that a client is told to wait, at least 1; None where the code is
    not that of a quota."""
    return max(1, math.ceil(wait_s or 0.0)) if code == _QUOTA else None


def error_body(error: SessionServerError, *, turn_id: str | None = None) -> ErrorBody:
    """Return the body for a typed error."""
    form = wire_error(error)
    return ErrorBody(
        type=form.kind,
        code=form.code,
        message=sanitize(error.message),
        param=error.param,
        turn_id=turn_id,
        retry_after_s=wait_of(form.code, getattr(error, "retry_after_s", None)),
    )


def internal_error_body() -> ErrorBody:
    """Return the body for an unexpected error; no detail leaves the server."""
    return ErrorBody(
        type=INTERNAL_ERROR.kind,
        code=INTERNAL_ERROR.code,
        message="Internal server error.",
        param=None,
    )


def to_invalid_request(error: Exception, kind: Any) -> InvalidRequest:
    """Convert a decoder's error to InvalidRequest; name the field if the decoder did.

    Args:
        error: of `msgspec`.
        kind: what was decoded; where a field takes one of a few values, they are named.
    """
    if isinstance(error, RecursionError):
        return InvalidRequest("The JSON is nested too deeply.")
    if isinstance(error, msgspec.ValidationError):
        match = _MSGSPEC_PATH.match(str(error))
        text, path = (match[1], match[2]) if match else (str(error), "")
        if field := _WRONG_FIELD.match(text):
            name = sanitize(field[2])
            is_unknown = field[1] == "contains unknown"
            hint = unknown_field_hint(kind, path, name) if is_unknown else ""
            shown = name if len(name) <= _MAX_SHOWN_CHARS else f"{name[:_MAX_SHOWN_CHARS]}..."
            text = f"There is no field `{shown}`{hint}" if is_unknown else f"`{name}` is missing"
            # The decoder's path ends at the object, so append the field.
            path = f"{path}.{name}" if path else name
        elif (wrong := _WRONG_VALUE.match(text)) and (values := values_at(kind, path)):
            text = f"{path} must be one of {', '.join(values)}; it is {wrong[1]}"
        elif pattern := _WRONG_PATTERN.match(text):
            text = f"Expected {pattern[2]} to {pattern[3]} characters of {_alphabet(pattern[1])}"
        elif text.startswith("Expected"):
            text = f"{path}: {_in_plain_words(text)}" if path else _in_plain_words(text)
        return InvalidRequest(sanitize(text), param=sanitize(path) or None)
    where = f": {error}" if isinstance(error, msgspec.DecodeError) else "."
    return InvalidRequest(f"The message is not valid JSON in UTF-8{where}")


def _in_plain_words(text: str) -> str:
    """Return what the decoder expected: "Expected `int | null`, got `str`", "`str` of length >= 1"
    and the like."""

    def types(found: re.Match[str]) -> str:
        return " or ".join(_PLAIN.get(word, word) for word in found[1].split(" | "))

    def bound(found: re.Match[str]) -> str:
        return f"{found[1] or ','} {_PLAIN[found[2]]} "

    return _JSON_BOUND.sub(bound, _JSON_TYPES.sub(types, text))


def _alphabet(characters: str) -> str:
    """Return what a class of a regular expression has, apart: `a-z_` is `a-z _`."""
    return " ".join(re.findall(r".-.|[^\\]", characters))
