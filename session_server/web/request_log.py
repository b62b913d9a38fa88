"""Count, name and log every request: the outermost layer around all routes.

A request is known by the id that its client sends as `x-request-id`, or by one that is made here;
the answer has it in the same header unless its route has set another. Lines hold the route, never
the path or the query of a request.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from session_server.core.errors import INTERNAL_ERROR
from session_server.core.origin import ORIGIN, Origin
from session_server.web.headers import REQUEST_ID, TRACE_CONTEXT
from session_server.web.refusals import error_response
from session_server.web.services import AppServices

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
MAX_TRACE_CHARS: Final = 512
"""Characters of a header of the trace context; a longer one is ignored."""

NO_ROUTE: Final = "other"
_CLIENT_GONE: Final = 499
"""The status that is counted for a request whose client left before it was answered."""

_logger: Final = logging.getLogger("session_server.web")


class RequestLog:
    """Give every request its origin, and report its end, as ASGI middleware.

    Each request and socket has a task of its own, so its origin is set and never taken back; and a
    socket costs no coroutine of this layer while it is open.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request on, and report it when it was answered."""
        if scope["type"] == "lifespan":
            return self._app(scope, receive, send)
        services: AppServices = scope["app"].state.services
        origin = origin_of(Headers(scope=scope), now_s=services.now_s())
        ORIGIN.set(origin)
        if scope["type"] == "websocket":
            return self._app(scope, receive, send)
        return self._answer(scope, receive, send, origin)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, origin: Origin) -> None:
        status = _CLIENT_GONE

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                origin.request_id = MutableHeaders(scope=message).setdefault(
                    REQUEST_ID, origin.request_id
                )
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            if status == _CLIENT_GONE:  # here, where an answer gets its id
                await error_response(error)(scope, receive, send_named)
            status, origin.refusal = 500, INTERNAL_ERROR.code
            raise
        finally:
            self._report(scope, status, origin)

    def _report(self, scope: Scope, status: int, origin: Origin) -> None:
        services: AppServices = scope["app"].state.services
        route = route_of(scope)
        services.metrics.count_request(route, status)
        if origin.refusal:
            services.metrics.count_refusal(origin.refusal)
        if status != _CLIENT_GONE:
            for delivered in origin.take_undelivered():
                delivered(services.now_s())
        ms = (services.now_s() - origin.received_s) * 1e3
        _logger.log(
            logging.WARNING if status == HTTPStatus.INTERNAL_SERVER_ERROR else logging.DEBUG,
            "request route=%s status=%d code=%s ms=%.1f request=%s",
            *(route, status, origin.refusal or "-", ms, origin.request_id),
        )


def origin_of(headers: Headers, *, now_s: float) -> Origin:
    """Return the origin of a request that has just arrived."""
    named = {name: headers[name] for name in TRACE_CONTEXT if name in headers}
    trace = {name: value for name, value in named.items() if len(value) <= MAX_TRACE_CHARS}
    return Origin(now_s, request_id_of(headers), trace or None)


def request_id_of(headers: Headers) -> str:
    """Return the id that the client gives its request, or a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(8)}"


def route_of(scope: Scope) -> str:
    """Return method and path of the route that a request came to, as the route declares them."""
    route = scope.get("route")
    if scope["method"] not in (getattr(route, "methods", None) or ()):
        return NO_ROUTE
    return f"{scope['method']} {getattr(route, 'path', '')}"
