"""Run a whole server: everything but its listening sockets, and those too where `serve` listens.

`running_server` is one server of whoever routes requests to it: of `serve`, which listens itself,
and of each replica under Ray Serve, which is handed requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from session_server import wiring
from session_server.config import HttpOptions, Settings
from session_server.core.engine_client import EventListener
from session_server.core.errors import EngineUnavailable
from session_server.core.events import EngineReady
from session_server.core.owner import KEY_VARIABLE
from session_server.core.turn_report import TurnReport
from session_server.metrics.logging import LOGGER_NAME, EventLog, TurnLog, configure_logging
from session_server.metrics.prometheus import ServerMetrics
from session_server.metrics.throughput import ThroughputLog
from session_server.metrics.tracing import TracingUnavailable, TurnTracing
from session_server.models.errors import ModelError
from session_server.served_model import open_model
from session_server.sessions.manager import SessionManager
from session_server.sessions.store.lock import StoreUnusable
from session_server.text.model_text import ModelText
from session_server.web.listener import bind, why_not
from session_server.web.services import AppServices
from session_server.wiring import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNUSABLE,
    EXIT_UNWRITTEN,
    Entrance,
    admin_host_of,
)

if TYPE_CHECKING:
    from session_server.web.app import Application

_logger: Final = logging.getLogger(LOGGER_NAME)


class Unusable(Exception):
    """Report a model, a store or settings that cannot be served."""


class _CannotListen(Exception):
    """Report an address that cannot be bound, and what to do."""


class _Model(NamedTuple):
    """Hold a model's directory, or its GGUF file, and its text side."""

    directory: Path
    text: ModelText


@dataclass(slots=True)
class RunningServer:
    """Hold a server that takes requests: its application, and what that stands on.

    `engine_failed` resolves with the reason when the engine is not started again any more.
    `has_lost_sessions`: sessions could not be written to the store; known once the server stopped.
    """

    app: Application
    services: AppServices
    engine_failed: asyncio.Future[str]
    has_lost_sessions: bool = False


def serve(settings: Settings, *, worded: Callable[[str], str] = str) -> int:
    """Serve until a signal, and return the exit status.

    0 after a clean shutdown, 1 if the engine or the address failed, 2 if the model, the keys, the
    certificate or the flags cannot be used, 3 if sessions could not be written to the store.
    Errors name settings by their flags; `worded` puts the names in their place that whoever gave
    them knows.
    """
    start_log(settings)
    try:
        wiring.check_role(settings)
        entrance = wiring.make_entrance(settings.http, take_key())
    except ValueError as error:
        return _refused(worded(str(error)))
    try:
        return asyncio.run(_serve(settings, entrance))
    except EngineUnavailable as error:
        status = EXIT_UNUSABLE if error.is_final else EXIT_FAILED
        return _refused(worded(f"the engine did not start: {error.message}"), status)
    except (Unusable, TracingUnavailable) as error:
        return _refused(worded(str(error)))
    except _CannotListen as error:
        return _refused(worded(str(error)), EXIT_FAILED)


def take_key() -> str | None:
    """Return the key in the environment, and remove it, so that child processes do not inherit
    it."""
    return os.environ.pop(KEY_VARIABLE, None)


def start_log(settings: Settings) -> None:
    """Write log lines as the settings say."""
    http, allows_color = settings.http, not os.environ.get("NO_COLOR")
    configure_logging(http.log_level, http.log_format, allows_color=allows_color)


def _refused(told: str, status: int = EXIT_UNUSABLE) -> int:
    print(f"session-server serve: {told}", file=sys.stderr)
    return status


async def _serve(settings: Settings, entrance: Entrance) -> int:
    async with contextlib.AsyncExitStack() as opened:
        # Before the engine starts: report a bad model or an address in use at once, not after the
        # model has been loaded.
        model = await opened.enter_async_context(_opened_model(settings))
        listeners = [
            opened.enter_context(contextlib.closing(_bind(*address)))
            for address in _addresses(settings.http)
        ]
        async with _running(settings, entrance, model) as server:
            status = await _serve_on(listeners, settings, server)
        return EXIT_UNWRITTEN if server.has_lost_sessions and status == EXIT_OK else status


@contextlib.asynccontextmanager
async def running_server(settings: Settings, entrance: Entrance) -> AsyncIterator[RunningServer]:
    """Run a server that does not listen, and stop it after the block. Whoever hands requests to its
    `app` runs the lifespan of that, and drains before the block ends.

    Raises:
        Unusable: the model or the store cannot be used.
        EngineUnavailable: the engine did not start.
        TracingUnavailable: a flag asks for traces, and OpenTelemetry is not installed.
    """
    async with (
        _opened_model(settings) as model,
        _running(settings, entrance, model) as server,
    ):
        yield server


@contextlib.asynccontextmanager
async def _opened_model(settings: Settings) -> AsyncIterator[_Model]:
    try:
        model = _Model(*await open_model(settings))
    except (ModelError, ValueError) as error:
        raise Unusable(str(error)) from error
    if model.text.chat_error is not None:
        _logger.warning("chat turns cannot be rendered: %s", model.text.chat_error)
    elif not model.text.takes_tools:
        _logger.info("tools of OpenAI's clients are left out: the chat template writes none")
    try:
        yield model
    finally:
        await model.text.close()


@contextlib.asynccontextmanager
async def _running(
    settings: Settings, entrance: Entrance, model: _Model
) -> AsyncIterator[RunningServer]:
    try:
        async with wiring.opened_store(settings, model.text, os.environ) as store:
            engine = wiring.make_engine(wiring.with_store(settings, store))
            manager = wiring.make_manager(
                settings, engine, model.text, store, replica_tag=entrance.replica_tag
            )
            metrics = ServerMetrics(now_s=time.monotonic)
            roles = wiring.make_roles(settings, manager, store)
            observers = (*_observers(settings, metrics), *roles.observers)
            async with (
                contextlib.aclosing(roles),
                _started(settings, manager, metrics, model, observers=observers) as ready,
            ):
                from session_server.web.app import create_app

                services = wiring.make_services(
                    settings,
                    manager,
                    metrics,
                    entrance=entrance,
                    directory=model.directory,
                    ready=ready,
                )
                services = replace(services, roles=roles)
                assert engine.failed is not None, "a started engine can fail"
                server = RunningServer(create_app(services), services, engine.failed)
                yield server
        use = manager.stats().store  # once the store is closed
        server.has_lost_sessions = (
            store is not None and use is not None and store.has_lost(use.num_behind)
        )
    except StoreUnusable as error:
        raise Unusable(str(error)) from error


@contextlib.asynccontextmanager
async def _started(
    settings: Settings,
    manager: SessionManager,
    metrics: ServerMetrics,
    model: _Model,
    *,
    observers: Sequence[EventListener],
) -> AsyncIterator[EngineReady]:
    """Run the engine inside the block, and those who are told of its turns."""
    _logger.info("starting the engine model=%s", model.directory.name)
    tracing = wiring.make_tracing(settings, model=wiring.name_of(settings, model.directory))
    watchers = (metrics, TurnLog(_logger), *([tracing] if tracing else ()))
    manager.on_turn_ended(partial(_tell, watchers))
    starting = asyncio.create_task(manager.start(observers))
    # What serves is imported while the engine's process imports torch: each takes half a second.
    await asyncio.to_thread(import_module, "session_server.web.server")
    ready = await starting
    try:
        yield ready
    finally:
        await manager.stop()
        if tracing is not None:
            tracing.close()
        _logger.info("stopped")


def _tell(watchers: Sequence[ServerMetrics | TurnLog | TurnTracing], record: TurnReport) -> None:
    for watcher in watchers:
        watcher.on_turn(record)


def _observers(settings: Settings, metrics: ServerMetrics) -> tuple[EventListener, ...]:
    interval_s = settings.http.throughput_interval_s
    throughput = ThroughputLog(_logger, interval_s=interval_s, now_s=time.monotonic)
    return metrics.on_event, EventLog(_logger).on_event, throughput.on_event


async def _serve_on(
    listeners: Sequence[socket.socket], settings: Settings, server: RunningServer
) -> int:
    from session_server.web import server as web_server

    _listen(listeners, settings.http)
    serving = asyncio.create_task(
        web_server.serve(server.app, server.services, listeners=listeners)
    )
    ends: tuple[asyncio.Future[Any], ...] = (serving, server.engine_failed)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if server.engine_failed.done():
        _logger.error("the engine failed for good: %s", server.engine_failed.result())
        if not serving.done():
            signal.raise_signal(signal.SIGTERM)
    await serving
    return EXIT_FAILED if server.engine_failed.done() else EXIT_OK


def _addresses(http: HttpOptions) -> list[tuple[str, int, str]]:
    """Return host, port and the flag of the port, for everybody and for operators."""
    public = (http.host, http.port, "--port")
    if http.admin_port is None:
        return [public]
    return [public, (admin_host_of(http), http.admin_port, "--admin-port")]


def _bind(host: str, port: int, flag: str) -> socket.socket:
    with _saying_what_to_do(host, port, flag):
        return bind(host, port)


def _listen(listeners: Sequence[socket.socket], http: HttpOptions) -> None:
    """Listen, before anything announces it: another server may have been started meanwhile, and
    two sockets can be bound to one address until one of them listens."""
    for listener, address in zip(listeners, _addresses(http), strict=True):
        with _saying_what_to_do(*address):
            listener.listen()


@contextlib.contextmanager
def _saying_what_to_do(host: str, port: int, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        told = why_not(host, port, error, f"pass another {flag} (0: any free port)")
        raise _CannotListen(told) from error
