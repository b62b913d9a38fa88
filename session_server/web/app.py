"""Build the application: every route guarded and authorized, with one form of error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from importlib import metadata
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from session_server.core.errors import SessionServerError
from session_server.core.events import MemoryReported
from session_server.sessions.conversations import UnnamedConversations
from session_server.sessions.overview import SessionOverview
from session_server.sessions.response_turns import ResponseTurns
from session_server.web import (
    admin,
    admin_sessions,
    chat_completions,
    completions,
    conversations,
    documents,
    pages,
    responses,
    rest,
    sglang,
    usage,
    ws_ticket,
)
from session_server.web.authenticator import Authenticator
from session_server.web.connection_table import ConnectionTable
from session_server.web.generation_run import SGLangState
from session_server.web.key_watch import KeyWatch
from session_server.web.live_state import live_state
from session_server.web.prefill import ClientsRefused, prefill_route
from session_server.web.readers import Readers
from session_server.web.realtime import RealtimeRuns, realtime_endpoint
from session_server.web.refusals import HttpRefusal, answer_error, deny, error_response
from session_server.web.request_guard import guards
from session_server.web.request_log import RequestLog
from session_server.web.requests import authorize
from session_server.web.responses_socket import responses_endpoint
from session_server.web.revocable_request import RevocableRequests
from session_server.web.revoked_owners import RevokedOwners
from session_server.web.server_watch import ServerWatch
from session_server.web.services import AppServices, WebSettings
from session_server.web.shared_task import SharedTask
from session_server.web.sockets import Sockets
from session_server.web.websocket import session_endpoint

Application = FastAPI
"""What `create_app` returns, for those who do not name the web framework."""

TICK_S: Final = 1.0
LAG_PROBE_S: Final = 0.1

PUBLIC_ROUTERS: Final = (
    rest.router,
    ws_ticket.router,
    usage.router,
    chat_completions.router,
    completions.router,
    responses.router,
    conversations.router,
    admin.router,
    sglang.router,
    documents.router,
    pages.router,
)
CLIENT_ROUTERS: Final = (
    rest.router,
    ws_ticket.router,
    chat_completions.router,
    completions.router,
    responses.router,
    conversations.router,
    sglang.router,
)
"""Routes about sessions and turns: not of a server that only computes prompts for others."""

ADMIN_ROUTERS: Final = (admin.operators, admin_sessions.router, sglang.operators, pages.operators)
"""Routes about the sessions of everybody. Given a bind of their own, they answer only there."""

ROUTERS: Final = (*PUBLIC_ROUTERS, *ADMIN_ROUTERS)

_logger: Final = logging.getLogger("session_server.web")


def describe(routers: Sequence[APIRouter] = ROUTERS, **options: Any) -> FastAPI:
    """Return an application that has routes and no services: enough for the documents."""
    app = FastAPI(
        title="session-server",
        version=metadata.version("session-server"),
        description="A streaming-session LLM server: a turn costs what its new tokens cost.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Response,  # it describes no content but what a route says
        **options,
    )
    for router in routers:
        app.include_router(router)
    return app


def create_app(services: AppServices) -> FastAPI:
    """Return the application over `services`, which the caller starts and stops."""
    settings = services.settings
    routers = ROUTERS if settings.admin_port is None else PUBLIC_ROUTERS
    is_prefill = services.roles.service is not None
    app = _guarded_app(settings, routers, is_prefill=is_prefill, lifespan=_lifespan)
    app.state.services = services
    app.state.authenticator = Authenticator(
        settings.keys, now_s=services.now_s, replica_tag=settings.replica_tag
    )
    app.state.readers = Readers(services)
    services.sessions.exits.count_readers = app.state.readers.num_readers
    app.state.sglang = SGLangState(services.sessions)
    app.state.unnamed = UnnamedConversations(
        services.sessions, count_readers=app.state.readers.num_readers
    )
    app.state.responses = ResponseTurns(
        services.sessions, count_readers=app.state.readers.num_readers
    )
    app.state.revoked_owners = RevokedOwners(
        services.sessions, app.state.unnamed, app.state.responses, app.state.authenticator
    )
    app.state.realtime = RealtimeRuns()
    app.state.sockets = Sockets(services.settings.max_connections)
    app.state.connections = ConnectionTable(services.settings.connections)
    app.state.recounts = (SharedTask[MemoryReported](), SharedTask[MemoryReported]())
    app.state.scraped_report = SharedTask[MemoryReported]()
    edits, drafts = services.sessions.edits, services.sessions.drafts
    app.state.overview = SessionOverview(
        edits.parts, drafts.copies.names, edits.clock, settings.keys.owner_of
    )
    app.state.watch = ServerWatch(services, app.state.overview)
    return app


def create_admin_app(app: FastAPI) -> FastAPI:
    """Return the application of the admin bind: every route, over what `app` has."""
    services: AppServices = app.state.services
    admin_app = _guarded_app(
        replace(services.settings, host=services.settings.admin_host),
        ROUTERS,
        is_prefill=services.roles.service is not None,
    )
    admin_app.state = app.state
    return admin_app


def _guarded_app(
    settings: WebSettings, routers: Sequence[APIRouter], *, is_prefill: bool, **options: Any
) -> FastAPI:
    refused = [Middleware(ClientsRefused, routers=CLIENT_ROUTERS)] if is_prefill else []
    log, revocable = Middleware(RequestLog), Middleware(RevocableRequests)
    app = describe(
        routers,
        dependencies=[Depends(authorize)],
        middleware=[log, *guards(settings), *refused, revocable],
        **options,
    )
    if is_prefill:
        app.router.routes.append(prefill_route())
    app.router.routes.append(WebSocketRoute("/v1/sessions/{session_id}/ws", session_endpoint))
    app.router.routes.append(WebSocketRoute("/v1/realtime", realtime_endpoint))
    app.router.routes.append(WebSocketRoute("/v1/responses", responses_endpoint))
    app.router.routes.append(WebSocketRoute("/{path:path}", _no_such_socket))
    misses = _Misses(routers)
    app.add_exception_handler(HTTPStatus.NOT_FOUND, misses.no_such_path)
    app.add_exception_handler(HTTPStatus.METHOD_NOT_ALLOWED, misses.no_such_method)
    for kind in (SessionServerError, HttpRefusal, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer_error)
    return app


class _Misses:
    """Answer requests that no route takes, with those that there are."""

    def __init__(self, routers: Sequence[APIRouter]) -> None:
        of_all = [route for router in routers for route in router.routes]
        self._routes = [route for route in of_all if isinstance(route, Route)]
        paths = {route.path for route in self._routes if "{" not in route.path}
        self._under_v1 = sorted(path for path in paths if path.startswith("/v1/"))

    async def no_such_path(self, request: Request, _: Exception) -> Response:
        """Answer an unknown path with a list of the known ones."""
        path: str = request.scope["path"]
        hint = "GET / lists the paths."
        if path.startswith("/v1/"):
            known = ", ".join(self._under_v1)
            hint = f"GET /openapi.json has all of them; under /v1 there are {known}."
        elif f"/v1{path}" in self._under_v1:  # of a client whose base URL is without /v1
            hint = f"There is /v1{path}: give /v1 at the end of the base URL."
        return error_response(HttpRefusal(404, f"There is no such path. {hint}"))

    async def no_such_method(self, request: Request, _: Exception) -> Response:
        """Refuse with all methods of the path; the router tells those of one route only."""
        path = request.scope["path"]
        first = next((route.path for route in self._routes if route.path_regex.match(path)), None)
        of_path = [route.methods or () for route in self._routes if route.path == first]
        allowed = {"allow": ", ".join(sorted({method for each in of_path for method in each}))}
        return error_response(HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers=allowed))


async def _no_such_socket(websocket: WebSocket) -> None:
    """Refuse a WebSocket on an unknown path; the framework would send a bare 403."""
    text = (
        "There is no such path. Sockets are at /v1/sessions/new/ws, /v1/sessions/{id}/ws, "
        "/v1/realtime and /v1/responses."
    )
    await deny(websocket, HttpRefusal(404, text))


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: AppServices = app.state.services
    num_tasks = _count_tasks(asyncio.get_running_loop())
    services.metrics.live.read = partial(live_state, services, app.state.connections, num_tasks)
    tasks = [
        asyncio.create_task(_tick(services, app.state.authenticator), name="tick"),
        asyncio.create_task(_probe_lag(services), name="loop lag"),
    ]
    sources = services.settings.keys.sources
    if sources is not None and sources.path is not None:
        watch = KeyWatch(services.settings.keys, sources, sources.path)
        work = _watch_keys(watch, app.state.authenticator, app.state.revoked_owners)
        tasks.append(asyncio.create_task(work, name="watch keys"))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _count_tasks(loop: asyncio.AbstractEventLoop) -> Callable[[], int]:
    """Return a count of the tasks made from now on that have not ended, without listing them."""
    num_live, nothing = 0, copy_context()

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **how: Any) -> asyncio.Task[Any]:
        nonlocal num_live
        num_live += 1
        task = asyncio.Task(coro, loop=loop, **how)
        task.add_done_callback(on_end, context=nothing)
        return task

    def on_end(_: asyncio.Task[Any]) -> None:
        nonlocal num_live
        num_live -= 1

    loop.set_task_factory(make)
    return lambda: num_live


async def _tick(services: AppServices, authenticator: Authenticator) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        authenticator.tickets.drop_expired()
        try:
            services.sessions.tick()
        except Exception:
            # One session that cannot be closed must not keep the others from expiring.
            _logger.exception("tick failed")


async def _watch_keys(
    watch: KeyWatch, authenticator: Authenticator, revoked_owners: RevokedOwners
) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        try:
            change = await watch.look()
            if change is not None:
                revoked_owners.add(change.gone_owners)
                await authenticator.revoke(change.gone)
            await revoked_owners.close_all()
        except Exception:
            # What was taken over stays so, and the next change is seen all the same.
            _logger.exception("keys were not taken over")


async def _probe_lag(services: AppServices) -> None:
    loop = asyncio.get_running_loop()
    while True:
        before_s = loop.time()
        await asyncio.sleep(LAG_PROBE_S)
        services.metrics.observe_loop_lag(max(0.0, loop.time() - before_s - LAG_PROBE_S))
