"""Checks of every request before a route sees it: one Host that we answer to (DNS rebinding), an
Origin we trust (browsers always send one, for WebSockets too), one framing header (request
smuggling), a body that is not too large.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from session_server.protocol.errors import ErrorResponse
from session_server.web.refusals import HttpRefusal, JsonResponse
from session_server.web.services import WebSettings

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST: Final = re.compile(r"^(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::\d{1,5})?$")


def is_loopback(host: str) -> bool:
    """Whether an address or name to bind is this machine's alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class RequestGuard:
    """ASGI middleware; refuses what no route should see, and bounds bodies."""

    def __init__(self, app: ASGIApp, *, settings: WebSettings) -> None:
        self._app = app
        self._max_body_bytes = settings.max_message_bytes
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        # Bound to every interface, the names by which we are reached are not ours to know.
        is_local = settings.host in _LOOPBACK
        self._hosts = _LOOPBACK | {host.lower() for host in settings.hosts} if is_local else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then hand on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope))
        except HttpRefusal as refusal:
            response = JsonResponse(ErrorResponse(error=refusal.body), refusal.status)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        host = self._checked_host(headers.getlist("host"))
        self._check_origin(headers.getlist("origin"), host)
        lengths = headers.getlist("content-length")
        if len(lengths) > 1 or (lengths and headers.getlist("transfer-encoding")):
            raise HttpRefusal(400, "A request has one length: Content-Length or chunks.")
        if lengths and not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
            raise HttpRefusal(400, "Content-Length is not a number.")
        if lengths and int(lengths[0]) > self._max_body_bytes:
            raise HttpRefusal(413, f"The body is larger than {self._max_body_bytes} bytes.")

    def _checked_host(self, hosts: Sequence[str]) -> str:
        match = _HOST.match(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            raise HttpRefusal(400, "A request names exactly one host.")
        name = match["name"].strip("[]").lower()
        if self._hosts is not None and name not in self._hosts:
            raise HttpRefusal(421, "This server does not answer to that host name.")
        return hosts[0].lower()

    def _check_origin(self, origins: Sequence[str], host: str) -> None:
        if not origins:
            return  # not a browser
        origin = origins[0].rstrip("/").lower()
        parts = urlsplit(origin) if len(origins) == 1 and len(origin) <= 512 else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
            raise HttpRefusal(403, "This origin is not allowed.")
        is_same = parts.netloc == host
        if not (is_same or _is_loopback(parts.netloc) or origin in self._origins):
            raise HttpRefusal(403, "This origin is not allowed.")


def _is_loopback(netloc: str) -> bool:
    match = _HOST.match(netloc)
    return match is not None and match["name"].strip("[]") in _LOOPBACK
