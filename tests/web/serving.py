"""The real application on a real port of this process, over real sessions and any engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar
from unittest import mock

import httpx
import uvicorn
from fastapi import FastAPI

from session_server.config import Settings, model_directory
from session_server.core.engine_client import EngineClient
from session_server.metrics.prometheus import ServerMetrics
from session_server.sessions.journal import JournalLimits
from session_server.sessions.manager import SessionManager
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.salts import TenantSalts
from session_server.text.model_text import ModelText
from session_server.web.app import create_app
from session_server.web.listener import bind
from session_server.web.server import DrainingServer, config_for
from session_server.web.services import AppServices, ModelCard, WebSettings
from session_server.web.sockets import Sockets
from session_server.wiring import make_manager, make_services
from tests.sessions.paper_engine import PaperEngine
from tests.text.local_text import load_local_text
from tests.web.wire_client import SUBPROTOCOL, Wire, http_client, open_wire, turn

WORD = 474
"""A token id with a text of its own that ends nothing."""

DEADLINE_S = 60.0

__all__ = ["SUBPROTOCOL", "WORD", "Served", "Wire", "served", "serving", "small_journal", "turn"]


@functools.cache
def model_text() -> ModelText:
    """The embedded model's tokenizer and template."""
    return load_local_text(model_directory(Settings().model))


class SteppedEngine(EngineClient, Protocol):
    """An engine on the event loop's thread: a step when asked for one, events when asked for."""

    @property
    def is_busy(self) -> bool: ...

    def step(self) -> object: ...

    def deliver(self) -> object: ...


LiveT = TypeVar("LiveT", bound=EngineClient)
EngineT = TypeVar("EngineT", bound=SteppedEngine)


@dataclass
class Served(Generic[LiveT]):
    """One running server and its levers. With `is_held` the engine takes no steps."""

    url: str
    engine: LiveT
    sessions: SessionManager
    services: AppServices
    server: DrainingServer
    app: FastAPI
    http: httpx.AsyncClient
    is_held: bool = False
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def sockets(self) -> Sockets:
        sockets: Sockets = self.app.state.sockets
        return sockets

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def pump(self) -> None:
        """Let the engine run, a step per turn of the loop."""
        while True:
            if not self.is_held:
                self.engine.step()
            self.engine.deliver()
            await asyncio.sleep(0)
            if not self.engine.is_busy or self.is_held:
                await asyncio.sleep(0.001)

    async def raw(self, payload: bytes) -> bytes:
        """What a connection answers to these bytes until it closes or falls silent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            writer.write(payload)
            await writer.drain()
            async with asyncio.timeout(1.0):
                while chunk := await reader.read(65536):
                    answer += chunk
        writer.close()
        return answer

    async def until_closed(self, payload: bytes) -> bytes:
        """What a connection answers to these bytes until the server closes it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError):
            writer.write(payload)
            await writer.drain()
        try:
            return await reader.read()
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def socket(
        self, session_id: str = "new", query: str = "", **options: Any
    ) -> AsyncIterator[Wire]:
        """A WebSocket that has heard the hello."""
        async with self.bare_socket(session_id, query, **options) as wire:
            wire.hello = await wire.receive()
            yield wire

    @contextlib.asynccontextmanager
    async def bare_socket(
        self, session_id: str = "new", query: str = "", **options: Any
    ) -> AsyncIterator[Wire]:
        """A WebSocket that has heard nothing."""
        async with open_wire(self.url, session_id, query, **options) as wire:
            yield wire

    async def open(self, **body: Any) -> str:
        """A new session over REST."""
        answer = await self.http.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        session_id: str = answer.json()["id"]
        return session_id

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something the test made happen."""
        while not condition():
            await asyncio.sleep(0.002)


def served(
    **settings: Any,
) -> Callable[[Callable[[Served], Awaitable[None]]], Callable[[], None]]:
    """Make a coroutine over a `Served` a test; `settings` are those of `WebSettings`."""

    def decorate(test: Callable[[Served], Awaitable[None]]) -> Callable[[], None]:
        def run() -> None:
            asyncio.run(_run(test, settings))

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


@contextlib.asynccontextmanager
async def serving(
    *,
    limits: SessionLimits | None = None,
    quotas: QuotaLimits | None = None,
    **settings: Any,
) -> AsyncIterator[Served[PaperEngine]]:
    """A server inside the block."""
    engine = PaperEngine(vocab_size=1536, eos_ids=(4,), next_token=lambda context: WORD)
    salts = TenantSalts(bytes(32))
    manager = SessionManager(engine, model_text(), salts=salts, limits=limits, quotas=quotas)
    async with serving_over(engine, manager, **settings) as this:
        yield this


@contextlib.asynccontextmanager
async def serving_over(
    engine: EngineT, manager: SessionManager, **settings: Any
) -> AsyncIterator[Served[EngineT]]:
    """A server of these sessions over an engine that takes its steps on this loop."""
    ready, metrics = await manager.start(), ServerMetrics(now_s=time.monotonic)
    manager.on_turn_ended(metrics.on_turn)
    services = AppServices(
        sessions=manager,
        metrics=metrics,
        model=ModelCard(
            name="paper",
            path="paper",
            vocab_size=ready.vocab_size,
            max_context=ready.max_turn_len,
            created_s=1,
            token_text=lambda token_id: manager.text.tokenizer.decode([token_id]),
            takes_tools=manager.text.takes_tools,
        ),
        settings=replace(WebSettings(port=0), **settings),
    )
    async with _listening(engine, services) as this:
        pump = asyncio.create_task(this.pump())
        try:
            yield this
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)


@contextlib.asynccontextmanager
async def serving_live(engine: LiveT) -> AsyncIterator[Served[LiveT]]:
    """A server wired as `session-server serve` wires it, over an engine that steps by itself."""
    settings = Settings()
    manager = make_manager(settings, engine, model_text())
    ready, metrics = await manager.start(), ServerMetrics(now_s=time.monotonic)
    directory = model_directory(settings.model)
    services = make_services(settings, manager, metrics, directory=directory, ready=ready)
    async with _listening(engine, services) as this:
        yield this


class _OftenAwake:
    """`asyncio` as uvicorn's server sees it, which looks every 0.1 s whether it should end: here
    every 5 ms, as a server is started and ended in each of hundreds of tests."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / 20)


@contextlib.asynccontextmanager
async def _listening(engine: LiveT, services: AppServices) -> AsyncIterator[Served[LiveT]]:
    """The application on a port of its own."""
    listener, is_listening = bind("127.0.0.1", 0), asyncio.Event()
    app = create_app(services)
    server = DrainingServer(config_for(app, services), is_listening.set)
    with mock.patch.object(uvicorn.server, "asyncio", _OftenAwake()):
        serve = asyncio.create_task(server.serve(sockets=[listener]))
        await is_listening.wait()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with http_client(url) as http:
                yield Served(url, engine, services.sessions, services, server, app, http)
        finally:
            server.should_exit = True
            await serve
            await services.sessions.stop()


def small_journal(max_entries: int) -> SessionLimits:
    """Limits under which a slow reader is soon overtaken."""
    return SessionLimits(journal=JournalLimits(max_entries=max_entries))


async def _run(test: Callable[[Served], Awaitable[None]], settings: dict[str, Any]) -> None:
    async with asyncio.timeout(DEADLINE_S), serving(**settings) as this:
        await test(this)
