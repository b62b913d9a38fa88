"""Build the application: every route guarded and authorized, with one form of error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from importlib import metadata
from typing import Any, Final

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from session_server.core.errors import SessionServerError, wire_error
from session_server.core.events import MemoryReported
from session_server.sessions.conversations import UnnamedConversations
from session_server.sessions.response_turns import ResponseTurns
from session_server.web import (
    admin,
    chat_completions,
    completions,
    conversations,
    documents,
    responses,
    rest,
    sglang,
)
from session_server.web.connection_table import ConnectionTable
from session_server.web.generation_run import SGLangState
from session_server.web.readers import Readers
from session_server.web.realtime import RealtimeRuns, realtime_endpoint
from session_server.web.refusals import HttpRefusal, answer_error, error_response
from session_server.web.request_guard import guards
from session_server.web.requests import authorize, services_of
from session_server.web.responses_socket import responses_endpoint
from session_server.web.services import AppServices
from session_server.web.shared_task import SharedTask
from session_server.web.sockets import Sockets
from session_server.web.websocket import session_endpoint

TICK_S: Final = 1.0
LAG_PROBE_S: Final = 0.1

ROUTERS: Final = (
    rest.router,
    chat_completions.router,
    completions.router,
    responses.router,
    conversations.router,
    admin.router,
    sglang.router,
    documents.router,
)
_ROUTES: Final = tuple(
    route for router in ROUTERS for route in router.routes if isinstance(route, Route)
)
_PATHS: Final = sorted(
    {route.path for route in _ROUTES if route.path.startswith("/v1/") and "{" not in route.path}
)
"""Paths without parameters under /v1, for the hint of a 404."""

_logger: Final = logging.getLogger("session_server.web")


def describe(**options: Any) -> FastAPI:
    """Return an application that has all routes and no services: enough for the documents."""
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
    for router in ROUTERS:
        app.include_router(router)
    return app


def create_app(services: AppServices) -> FastAPI:
    """Return the application over `services`, which the caller starts and stops."""
    app = describe(
        lifespan=_lifespan,
        dependencies=[Depends(authorize)],
        middleware=guards(services.settings),
    )
    app.state.services = services
    app.state.readers = Readers(services)
    app.state.sglang = SGLangState(services.sessions)
    app.state.unnamed = UnnamedConversations(
        services.sessions, count_readers=app.state.readers.num_readers
    )
    app.state.responses = ResponseTurns(
        services.sessions, count_readers=app.state.readers.num_readers
    )
    app.state.realtime = RealtimeRuns()
    app.state.sockets = Sockets(services.settings.max_connections)
    app.state.connections = ConnectionTable(services.settings.connections)
    app.state.recounts = (SharedTask[MemoryReported](), SharedTask[MemoryReported]())
    app.state.scraped_report = SharedTask[MemoryReported]()
    app.router.routes.append(WebSocketRoute("/v1/sessions/{session_id}/ws", session_endpoint))
    app.router.routes.append(WebSocketRoute("/v1/realtime", realtime_endpoint))
    app.router.routes.append(WebSocketRoute("/v1/responses", responses_endpoint))
    app.router.routes.append(WebSocketRoute("/{path:path}", _no_such_socket))
    app.add_exception_handler(SessionServerError, _answer_refusal)
    app.add_exception_handler(HTTPStatus.NOT_FOUND, _no_such_path)
    app.add_exception_handler(HTTPStatus.METHOD_NOT_ALLOWED, _no_such_method)
    for kind in (HttpRefusal, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer_error)
    return app


async def _no_such_path(request: Request, _: Exception) -> Response:
    """Answer an unknown path with a list of the known ones."""
    is_under_v1 = request.scope["path"].startswith("/v1/")
    hint = "GET / lists the paths."
    if is_under_v1:
        hint = f"GET /openapi.json has all of them; under /v1 there are {', '.join(_PATHS)}."
    return error_response(HttpRefusal(404, f"There is no such path. {hint}"))


async def _no_such_method(request: Request, _: Exception) -> Response:
    """Refuse with all methods of the path; the router tells those of one route only."""
    path = request.scope["path"]
    first = next((route.path for route in _ROUTES if route.path_regex.match(path)), None)
    methods = {method for route in _ROUTES if route.path == first for method in route.methods or ()}
    allowed = {"allow": ", ".join(sorted(methods))}
    return error_response(HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers=allowed))


async def _no_such_socket(websocket: WebSocket) -> None:
    """Refuse a WebSocket on an unknown path; the framework would send a bare 403."""
    text = (
        "There is no such path. Sockets are at /v1/sessions/new/ws, /v1/sessions/{id}/ws, "
        "/v1/realtime and /v1/responses."
    )
    await websocket.send_denial_response(error_response(HttpRefusal(404, text)))


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, SessionServerError), "registered for it"
    services_of(request).metrics.count_refusal(wire_error(error).code)
    return error_response(error)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: AppServices = app.state.services
    services.metrics.set_live_gauges(
        sessions=lambda: services.sessions.stats().sessions,
        tasks=_count_tasks(asyncio.get_running_loop()),
    )
    tasks = [
        asyncio.create_task(_tick(services), name="tick"),
        asyncio.create_task(_probe_lag(services), name="loop lag"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _count_tasks(loop: asyncio.AbstractEventLoop) -> Callable[[], int]:
    """Return a count of the tasks made from now on that have not ended, without listing them."""
    live: set[asyncio.Task[Any]] = set()

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **how: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=loop, **how)
        live.add(task)
        task.add_done_callback(live.discard)
        return task

    loop.set_task_factory(make)
    return lambda: len(live)


async def _tick(services: AppServices) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        try:
            services.sessions.tick()
        except Exception:
            # One session that cannot be closed must not keep the others from expiring.
            _logger.exception("tick failed")


async def _probe_lag(services: AppServices) -> None:
    loop = asyncio.get_running_loop()
    while True:
        before_s = loop.time()
        await asyncio.sleep(LAG_PROBE_S)
        services.metrics.observe_loop_lag(max(0.0, loop.time() - before_s - LAG_PROBE_S))
