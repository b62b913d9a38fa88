"""Run the application under uvicorn, with our own signal handling and drain.

uvicorn alone closes every WebSocket with 1012 as soon as it is told to stop. Here the first SIGTERM
or SIGINT drains: no new work, `session.draining` to every reader, running turns get `drain_s`, then
sockets close with 1012. A second signal ends running turns at once, and their readers are told. A
third exits immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, TextIO

import uvicorn
from fastapi import FastAPI

from session_server.protocol.session_protocol import CloseCode
from session_server.web.http_guard import GuardedConfig, GuardedHttp
from session_server.web.listener import ACCEPTS_AT_ONCE, EXHAUSTED, bind
from session_server.web.services import AppServices
from session_server.web.sockets import Sockets
from session_server.web.websocket_guard import GuardedWebSocket

_logger: Final = logging.getLogger("session_server.web")

SHUTDOWN_S: Final = 5
KEEP_ALIVE_S: Final = 60
CLOSE_WAIT_S: Final = 2.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class DrainingServer(uvicorn.Server):
    """Run uvicorn's server without its signal handlers, and report when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `serve`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call `on_listening`."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_listening()


async def serve(
    app: FastAPI,
    services: AppServices,
    *,
    listener: socket.socket | None = None,
    ready: TextIO = sys.stdout,
) -> None:
    """Listen until a signal, then drain and return.

    `listener` is a bound socket of the caller's; None binds the address of the settings. Once the
    server listens, `announce` prints its URL with the real port to `ready`.

    Raises:
        OSError: the address cannot be bound.
    """
    if listener is None:
        listener = bind(services.settings.host, services.settings.port)
    url = _url_of(listener)

    def announce_ready() -> None:
        announce(url, ready, needs_key=not services.settings.keys.is_open)

    asyncio.get_running_loop().set_exception_handler(_log_unhandled)
    server = DrainingServer(config_for(app, services), announce_ready)
    stop, second_signal = asyncio.Event(), asyncio.Event()
    with _signals(stop, second_signal, server):
        drainers = (
            asyncio.create_task(drain_on_signal(stop, app, services, server), name="drain"),
            asyncio.create_task(cut_drain_short(second_signal, services), name="hasten"),
        )
        try:
            await server.serve(sockets=[listener])
            if server.force_exit:  # else its lifespan is canceled with the loop: a logged error
                await server.lifespan.shutdown()
        finally:
            for drainer in drainers:
                drainer.cancel()
            await asyncio.gather(*drainers, return_exceptions=True)
            listener.close()


def announce(url: str, ready: TextIO, *, needs_key: bool) -> None:
    """Print where the server listens; on a terminal also what to do next."""
    lines = [f"listening on {url}"]
    if ready.isatty():
        variable, header = (
            ("SESSION_SERVER_API_KEY=KEY ", " -H 'authorization: Bearer KEY'")
            if needs_key
            else ("", "")
        )
        json_type = "content-type: application/json"
        lines += [
            f"  chat           {variable}session-server chat --url {url}",
            f"  memory         {variable}session-server audit --url {url}",
            f"  over HTTP      curl {url}/v1/sessions{header} -H '{json_type}' -d '{{}}'",
            "  protocols      docs/protocol.md, and /openapi.json of this server",
            "  Ctrl-C drains and stops it",
        ]
    print("\n".join(lines), file=ready, flush=True)


def config_for(app: FastAPI, services: AppServices) -> GuardedConfig:
    """Return uvicorn's configuration of the application."""
    settings = services.settings
    return GuardedConfig(
        app,
        settings=settings,
        table=app.state.connections,
        http=GuardedHttp,
        ws=GuardedWebSocket,
        ws_max_size=settings.max_message_bytes,
        ws_ping_interval=settings.heartbeat_s,
        ws_ping_timeout=settings.ping_timeout_s,
        ws_per_message_deflate=False,
        backlog=ACCEPTS_AT_ONCE,
        access_log=False,
        log_config=None,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        lifespan="on",
    )


async def drain_on_signal(
    stop: asyncio.Event, app: FastAPI, services: AppServices, server: uvicorn.Server
) -> None:
    """Wait for `stop`, finish running turns, close the sockets, and stop the server."""
    await stop.wait()
    sockets = app.state.sockets
    assert isinstance(sockets, Sockets), "create_app set it"
    stats = services.sessions.stats()
    _logger.info(
        "draining sessions=%d turns=%d deadline_s=%g",
        stats.sessions,
        stats.live_turns,
        services.settings.drain_s,
    )
    try:
        await services.sessions.drain(services.settings.drain_s)
        _logger.info("drained, closing %d sockets", sockets.num_attached)
        sockets.end_all(CloseCode.RESTART)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_S):
                while sockets.num_attached:
                    await asyncio.sleep(0.02)
    finally:
        server.should_exit = True


async def cut_drain_short(second_signal: asyncio.Event, services: AppServices) -> None:
    """Wait for `second_signal`, then end the turns that the drain waits for."""
    await second_signal.wait()
    _logger.info("second signal: ending running turns")
    await services.sessions.drain(0.0)


@contextlib.contextmanager
def _signals(
    stop: asyncio.Event, second_signal: asyncio.Event, server: uvicorn.Server
) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if second_signal.is_set():
            server.should_exit = server.force_exit = True
        elif stop.is_set():
            second_signal.set()
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that nobody awaits; failures of `accept` without a stack."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        _logger.warning("no new connections for a second: %s", error.strerror)
    else:
        loop.default_exception_handler(context)


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
