"""The whole server in this process, over an engine with a fake device: on a thread or a process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec

from session_server.config import ModelSettings, Settings, model_directory
from session_server.core.batch import Batch, PendingStep, Runner
from session_server.core.commands import CancelTurn, EngineCommand
from session_server.core.engine_client import EngineClient, EventListener
from session_server.core.events import EngineEvent, EngineReady, TurnFinished
from session_server.core.ids import TurnId
from session_server.engine_host.inline import InlineEngine
from session_server.engine_host.loop import EngineAssembly
from session_server.engine_host.process import EngineProcess, ProcessSettings
from session_server.metrics.prometheus import ServerMetrics
from session_server.sessions.manager import SessionManager
from session_server.web.app import create_app
from session_server.web.listener import bind
from session_server.web.server import DrainingServer, config_for
from session_server.wiring import make_manager, make_services
from tests.chaos.rest_client import http_client
from tests.engine_host.live_echo import LiveStage, assemble
from tests.web.serving import model_text


@dataclass
class LaunchCounter:
    """A `Runner` that counts the forwards each turn had a row in."""

    runner: Runner
    launches: Counter[TurnId]

    def launch(self, batch: Batch) -> PendingStep:
        """See `Runner.launch`."""
        self.launches.update(row.turn_id for row in batch.rows)
        return self.runner.launch(batch)


@dataclass
class WatchedEngine:
    """An `EngineClient` that notes, once a cancel is in the engine's inbox, how many forwards the
    turn has been in so far."""

    inner: InlineEngine
    launches: Counter[TurnId]
    cancelled_after: dict[TurnId, int] = field(default_factory=dict)
    ended: set[TurnId] = field(default_factory=set)

    async def start(self, listener: EventListener) -> EngineReady:
        """See `EngineClient.start`."""

        def hear(event: EngineEvent) -> None:
            if isinstance(event, TurnFinished):
                self.ended.add(event.turn_id)
            listener(event)

        return await self.inner.start(hear)

    def send(self, command: EngineCommand) -> None:
        """See `EngineClient.send`."""
        self.inner.send(command)
        if isinstance(command, CancelTurn):
            self.cancelled_after[command.turn_id] = self.launches[command.turn_id]

    async def stop(self) -> None:
        """See `EngineClient.stop`."""
        await self.inner.stop()

    def late_launches(self, turn_id: TurnId) -> int:
        """Forwards with a row of the turn that began after its cancel was in the inbox."""
        return self.launches[turn_id] - self.cancelled_after[turn_id]


@dataclass
class InProcess:
    """One running server."""

    url: str
    http: httpx.AsyncClient
    sessions: SessionManager


@contextlib.asynccontextmanager
async def in_process(engine: EngineClient) -> AsyncIterator[InProcess]:
    """A server inside the block, wired as `session-server serve` wires it, over this engine."""
    settings = Settings()
    manager = make_manager(settings, engine, model_text())
    ready = await manager.start()
    directory = model_directory(ModelSettings())
    metrics = ServerMetrics(now_s=time.monotonic)
    services = make_services(settings, manager, metrics, directory=directory, ready=ready)
    app = create_app(services)
    listener, listening = bind("127.0.0.1", 0), asyncio.Event()
    server = DrainingServer(config_for(app, services), listening.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await listening.wait()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with http_client(url) as http:
            yield InProcess(url, http, manager)
    finally:
        server.should_exit = True
        await serving
        await manager.stop()


def watched_engine(stage: LiveStage) -> WatchedEngine:
    """An engine on a thread, over the fake device that `stage` describes."""
    launches: Counter[TurnId] = Counter()

    def build() -> EngineAssembly:
        assembly = assemble(msgspec.msgpack.encode(stage))
        return replace(assembly, runner=LaunchCounter(assembly.runner, launches))

    return WatchedEngine(InlineEngine(build), launches)


def mortal_engine(stage: LiveStage) -> EngineProcess:
    """The same engine in a child process, which is started again at once whenever it dies."""
    argv = (sys.executable, str(Path(__file__).parents[1] / "engine_host" / "echo_child.py"))
    return EngineProcess(
        ProcessSettings(
            argv,
            msgspec.msgpack.encode(stage),
            backoff_first_s=0.01,
            backoff_max_s=0.05,
            max_failures=1_000_000,
        )
    )
