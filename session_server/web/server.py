"""Run the application under uvicorn, with our own signal handling and drain.

uvicorn alone closes every WebSocket with 1012 as soon as it is told to stop. Here the first SIGTERM
or SIGINT drains: no new work, `session.draining` to every reader, running turns get `drain_s`, then
sockets close with 1012. A second signal ends running turns at once, and their readers are told. A
third exits immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TextIO, cast

import uvicorn
from fastapi import FastAPI

from session_server.core.child_process import called_as
from session_server.web.app import create_admin_app
from session_server.web.certificate import Certificate
from session_server.web.drain import drain
from session_server.web.http_guard import GuardedConfig, GuardedHttp
from session_server.web.listener import ACCEPTS_AT_ONCE, EXHAUSTED
from session_server.web.services import AppServices
from session_server.web.tls import TlsConnection
from session_server.web.websocket_guard import GuardedWebSocket

_logger: Final = logging.getLogger("session_server.web")

SHUTDOWN_S: Final = 5
KEEP_ALIVE_S: Final = 60
LOOK_S: Final = 1.0
"""Seconds between two looks at the certificate's files."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_GC_THRESHOLDS: Final = (5_000, 2, 400)
"""A young collection walks 20,000 objects at most, which takes milliseconds. A full one follows
eight million allocations that were not freed; a request leaves a handful of objects in a cycle."""


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
    listeners: Sequence[socket.socket],
    ready: TextIO = sys.stdout,
) -> None:
    """Listen until a signal, then drain and return.

    `listeners` are bound sockets: that of everybody, then that of operators if the settings have a
    bind of their own for them. Once the server listens, `announce` prints its URL with the real
    port to `ready`.
    """
    is_encrypted = services.settings.certificate is not None
    url, *admin_urls = (_url_of(listener, is_encrypted=is_encrypted) for listener in listeners)
    servers: list[DrainingServer] = []

    def announce_ready() -> None:
        if all(server.started for server in servers):
            for admin_url in admin_urls:
                ready.write(f"for operators: {admin_url}\n")
            logs = services.sessions.edits.parts.logs
            needs_key = not services.settings.keys.is_open
            announce(url, ready, needs_key=needs_key, kept_in=logs.directory)

    _settle_collector()
    asyncio.get_running_loop().set_exception_handler(_log_unhandled)
    servers.append(DrainingServer(config_for(app, services), announce_ready))
    if admin_urls:
        config = config_for(create_admin_app(app), services, lifespan="off")
        servers.append(DrainingServer(config, announce_ready))
    stop, second_signal = asyncio.Event(), asyncio.Event()
    with _signals(stop, second_signal, servers):
        drainers = (
            asyncio.create_task(drain_on_signal(stop, app, services, servers), name="drain"),
            asyncio.create_task(cut_drain_short(second_signal, services), name="hasten"),
            asyncio.create_task(_watch_certificate(services.settings.certificate), name="watch"),
        )
        try:
            async with asyncio.TaskGroup() as serving:
                for server, listener in zip(servers, listeners, strict=True):
                    serving.create_task(server.serve(sockets=[listener]))
            if servers[0].force_exit:  # else the lifespan is canceled with the loop: a logged error
                await servers[0].lifespan.shutdown()
        finally:
            for drainer in drainers:
                drainer.cancel()
            await asyncio.gather(*drainers, return_exceptions=True)
            for listener in listeners:
                listener.close()


def _settle_collector() -> None:
    """Exclude what exists now from collections of the cyclic garbage collector, and make full ones
    rare: a full one walks every object of every session and stops the event loop meanwhile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def announce(url: str, ready: TextIO, *, needs_key: bool, kept_in: Path | None) -> None:
    """Print where the server listens; on a terminal also what to do next."""
    lines = [f"listening on {url}"]
    if ready.isatty():
        variable, header = (
            ("SESSION_SERVER_API_KEY=KEY ", " -H 'authorization: Bearer KEY'")
            if needs_key
            else ("", "")
        )
        json_type = "content-type: application/json"
        kept = f"are kept in {kept_in}" if kept_in else "are not kept: they end with the server"
        lines += [
            f"  chat           {variable}{called_as()} chat --url {url}",
            f"  memory         {variable}{called_as()} audit --url {url}",
            f"  over HTTP      curl {url}/v1/sessions{header} -H '{json_type}' -d '{{}}'",
            f"  sessions       {kept}",
            "  protocols      docs/protocol.md, and /openapi.json of this server",
            "  Ctrl-C drains and stops it",
        ]
    # In one write: the log may go to the same pipe, and `print` writes the last newline on its own.
    ready.write("\n".join([*lines, ""]))
    ready.flush()


def config_for(
    app: FastAPI, services: AppServices, *, lifespan: Literal["on", "off"] = "on"
) -> GuardedConfig:
    """Return uvicorn's configuration of the application."""
    settings = services.settings
    return GuardedConfig(
        app,
        services=services,
        table=app.state.connections,
        http=_protocol_of(app, services),
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
        lifespan=lifespan,
    )


def _protocol_of(app: FastAPI, services: AppServices) -> type[asyncio.Protocol]:
    """Return what makes the protocol of a connection: HTTP, behind TLS with a certificate."""
    certificate = services.settings.certificate
    if certificate is None:
        return GuardedHttp

    def make(**how: Any) -> TlsConnection:
        return TlsConnection(
            functools.partial(GuardedHttp, **how),
            certificate=certificate,
            table=app.state.connections,
            connections=how["server_state"].connections,
        )

    return cast(type[asyncio.Protocol], make)


async def drain_on_signal(
    stop: asyncio.Event, app: FastAPI, services: AppServices, servers: Sequence[uvicorn.Server]
) -> None:
    """Wait for `stop`, finish running turns, close the sockets, and stop the servers."""
    await stop.wait()
    try:
        await drain(services, app.state.sockets)
    finally:
        for server in servers:
            server.should_exit = True


async def cut_drain_short(second_signal: asyncio.Event, services: AppServices) -> None:
    """Wait for `second_signal`, then end the turns that the drain waits for."""
    await second_signal.wait()
    _logger.info("second signal: ending running turns")
    await services.sessions.drain(0.0)


@contextlib.contextmanager
def _signals(
    stop: asyncio.Event, second_signal: asyncio.Event, servers: Sequence[uvicorn.Server]
) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if second_signal.is_set():
            for server in servers:
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


async def _watch_certificate(certificate: Certificate | None) -> None:
    """Take over a certificate that is replaced on disk; connections keep the one they have."""
    while certificate is not None:
        await asyncio.sleep(LOOK_S)
        await asyncio.to_thread(certificate.refresh)  # the disk may be slow


def _url_of(listener: socket.socket, *, is_encrypted: bool) -> str:
    scheme, (host, port) = "https" if is_encrypted else "http", listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
