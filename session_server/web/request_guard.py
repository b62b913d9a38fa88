"""Check the host, origin and length of every request before a route sees it.

A browser sends whatever requests a web page asks for. One rule covers `fetch`, WebSockets and all
other requests of pages: the page must come from this server's own host, from this machine if the
server is bound to loopback, or from an `--allowed-origin`. Programs that are not browsers send
neither Origin nor Sec-Fetch-Site, and the rule does not apply to them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from session_server.web.headers import READ_BY_ROUTES, SENT_BY_SDKS, SHOWN_TO_PAGES
from session_server.web.listener import is_loopback
from session_server.web.refusals import HttpRefusal, error_response
from session_server.web.services import WebSettings

DRAIN: Final = "session_server.drain"
"""In the state of a scope: waits until the peer has read what was written to its connection."""

METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
_LOOPBACK_ORIGIN: Final = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST: Final = re.compile(r"^(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(?::\d{1,5})?$")
_FOREIGN_ORIGIN: Final = "This origin is not allowed; see --allowed-origin."
_FOREIGN_SITES: Final = ("cross-site", "same-site")


def is_browser(headers: Headers) -> bool:
    """Return whether a web page may have sent this request; a page cannot hide that."""
    return "sec-fetch-site" in headers or headers.get("user-agent", "").startswith("Mozilla/")


def guards(settings: WebSettings) -> list[Middleware]:
    """Return the middleware of every request, outermost first."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=[origin.rstrip("/").lower() for origin in settings.allowed_origins],
        allow_origin_regex=_LOOPBACK_ORIGIN if is_loopback(settings.host) else None,
        allow_methods=METHODS,
        allow_headers=(*READ_BY_ROUTES, *SENT_BY_SDKS),
        expose_headers=SHOWN_TO_PAGES,
    )
    return [Middleware(RequestGuard, settings=settings), cors]


class RequestGuard:
    """Refuse requests that no route should see, as ASGI middleware."""

    def __init__(self, app: ASGIApp, *, settings: WebSettings) -> None:
        self._app = app
        self._max_body_bytes = settings.max_message_bytes
        self._is_local = is_loopback(settings.host)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        self._hosts = frozenset(host.lower() for host in (settings.host, *settings.hosts))
        # The host check stops DNS rebinding, by which a page reaches the server under its own name.
        # Such a page has no key, so a server with keys may accept unlisted names.
        self._is_any_host = not self._is_local and not settings.hosts and not settings.keys.is_open

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Check the request, then pass it on; an idle socket keeps no frame for that."""
        match scope["type"]:
            case "http":
                return self._serve(scope, receive, send)
            case "websocket" if (refusal := self._refusal(scope)) is not None:
                scope["app"].state.services.metrics.count_refusal(refusal.body.code)
                return error_response(refusal)(scope, receive, send)
            case _:
                return self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if drain := scope.get("state", {}).get(DRAIN):
            # Or the peer could let an answer wait behind one that it does not read.
            await drain()
        refusal = self._refusal(scope)
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> HttpRefusal | None:
        try:
            self._check(scope, Headers(scope=scope))
        except HttpRefusal as refusal:
            return refusal
        return None

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = self._check_host(headers.getlist("host"))
        origins = headers.getlist("origin")
        if origins:
            self._check_origin(origins, host)
        elif headers.get("sec-fetch-site") in _FOREIGN_SITES and not _is_navigation(scope, headers):
            # Images, forms, scripts and frames of another site send GETs without an Origin.
            raise HttpRefusal(403, _FOREIGN_ORIGIN)
        lengths = headers.getlist("content-length")
        if len(lengths) > 1 or (lengths and headers.getlist("transfer-encoding")):
            raise HttpRefusal(400, "A request must have one length: Content-Length or chunks.")
        if lengths and not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
            raise HttpRefusal(400, "Content-Length is not a number.")
        if lengths and int(lengths[0]) > self._max_body_bytes:
            raise HttpRefusal(413, f"The body is larger than {self._max_body_bytes} bytes.")

    def _check_host(self, hosts: Sequence[str]) -> str:
        match = _HOST.match(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            raise HttpRefusal(400, "A request must have exactly one valid Host header.")
        name = match["name"].strip("[]").lower()
        if not (self._is_any_host or name in self._hosts or self._is_address_or_loopback(name)):
            raise HttpRefusal(
                421, "This server does not answer to that host name; see --allowed-host."
            )
        return hosts[0].lower()

    def _is_address_or_loopback(self, name: str) -> bool:
        """Return whether a Host cannot be a DNS name that an attacker controls."""
        if name in _LOOPBACK_NAMES:
            return True
        return not self._is_local and _is_address(name)

    def _check_origin(self, origins: Sequence[str], host: str) -> None:
        origin = origins[0].rstrip("/").lower()
        try:
            parts = urlsplit(origin) if len(origins) == 1 and len(origin) <= 512 else None
        except ValueError:  # brackets around what is no address
            parts = None
        if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
            raise HttpRefusal(403, _FOREIGN_ORIGIN)
        is_local = self._is_local and re.fullmatch(_LOOPBACK_ORIGIN, origin) is not None
        if not (parts.netloc == host or is_local or origin in self._origins):
            raise HttpRefusal(403, _FOREIGN_ORIGIN)


def _is_navigation(scope: Scope, headers: Headers) -> bool:
    """Return whether the user follows a link to this server in a top-level window.

    A page can navigate its visitors too, so a GET from a browser must not change anything.
    """
    return (
        scope.get("method") == "GET"
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
