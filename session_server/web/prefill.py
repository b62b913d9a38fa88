"""Compute prompts for other replicas, and refuse clients where a server does nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Final

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from session_server.core.errors import ServerBusy, Unauthorized
from session_server.sessions.roles.joining import Roles
from session_server.sessions.roles.messages import PATH, Forged, PrefillRequest, line_of
from session_server.sessions.roles.serving import PrefillService
from session_server.web.event_stream import EventStream
from session_server.web.refusals import HttpRefusal, error_response
from session_server.web.requests import services_of

_NEWS: Final = "application/x-ndjson"

REFUSED: Final = ServerBusy(
    "This server computes prompts for others (--role prefill). Send sessions and turns to one with "
    "--role decode or both."
)


def prefill_route() -> Route:
    """Return the route of other replicas. It needs no key: what it is asked is sealed."""
    return Route(PATH, _prefill, methods=["POST"])


async def _prefill(request: Request) -> Response:
    """Compute a prompt, telling news of it until it is written. Whoever disconnects does not wait
    any more."""
    roles: Roles = services_of(request).roles
    try:
        asked = roles.unseal(await request.body())
    except ClientDisconnect:
        return error_response(HttpRefusal(400, "The body is incomplete."))
    except Forged as error:
        return error_response(Unauthorized(f"Only replicas of one store may ask this: {error}."))
    assert roles.service is not None, "a server that unseals requests serves them"
    answer = EventStream(_lines(roles.service, asked))
    answer.headers["content-type"] = _NEWS
    return answer


async def _lines(service: PrefillService, asked: PrefillRequest) -> AsyncGenerator[bytes, None]:
    serving = service.serve(asked)
    try:
        async for news in serving:
            yield line_of(news)
    finally:
        await serving.aclose()


class ClientsRefused:
    """Refuse every session and turn, as ASGI middleware of a server that only prefills."""

    def __init__(self, app: ASGIApp, *, routers: Sequence[APIRouter]) -> None:
        """`routers`: those of clients."""
        self._app = app
        self._routes = [route for router in routers for route in router.routes]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass on what is not for clients."""
        kind = scope["type"]
        is_refused = kind == "websocket" or (kind == "http" and self._is_for_clients(scope))
        return (error_response(REFUSED) if is_refused else self._app)(scope, receive, send)

    def _is_for_clients(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS":
            return False
        return any(route.matches(scope)[0] is not Match.NONE for route in self._routes)
