"""Read why a server let nobody in, and whether and when trying again may help."""

from __future__ import annotations

import re
import ssl
from http import HTTPStatus
from typing import Final

import msgspec
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus

from session_server.client.errors import ClientError, ConnectionLost, Refused, UntrustedServer
from session_server.client.turn import WireFailure

RETRYABLE_CLOSE_CODES: Final = frozenset({1001, 1005, 1006, 1011, 1012, 1013})
"""Codes after which reconnecting may help: lost connection, restart, overload, slow reader."""

SESSION_MOVED: Final = "session_moved"
"""The code with which a server says that another one holds the session: it can be asked again."""

_SECONDS: Final = re.compile("[0-9]{1,9}")


def final_error(error: Exception) -> ClientError | None:
    """Return the error of a failed attempt if trying again cannot help; None if it may."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UntrustedServer(f"its certificate is not trusted: {error.verify_message}")
    if isinstance(error, ConnectionClosed):
        code = None if error.rcvd is None else error.rcvd.code
        if code is None or code in RETRYABLE_CLOSE_CODES:
            return None
        return ConnectionLost(f"closed by the server: {error}", code=code)
    if isinstance(error, InvalidStatus):
        status = error.response.status_code
        if not 400 <= status < 500 or status == HTTPStatus.TOO_MANY_REQUESTS:
            return None
        refusal = refusal_in(error) or Refused(f"http_{status}", "")
        return None if refusal.code == SESSION_MOVED else refusal
    return None


def refusal_in(error: Exception) -> Refused | None:
    """Return what the server has said with which it refused a handshake, if it has."""
    body = error.response.body if isinstance(error, InvalidStatus) else None
    try:
        failure = msgspec.json.decode(body or b"", type=dict[str, WireFailure])["error"]
    except (msgspec.MsgspecError, KeyError):
        return None
    wait_s = failure.retry_after_s or asked_s(error) or None
    return msgspec.structs.replace(failure, retry_after_s=wait_s).refusal()


def asked_s(error: Exception) -> int:
    """Return the seconds that a server asks to be left alone for, which refused a handshake."""
    headers = error.response.headers if isinstance(error, InvalidStatus) else Headers()
    asked = "".join(headers.get_all("Retry-After"))
    return int(asked) if _SECONDS.fullmatch(asked) else 0
