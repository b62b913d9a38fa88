"""The engine on a thread of the server's process: for tests, debugging and small machines."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from session_server.core.commands import EngineCommand, Shutdown
from session_server.core.engine_client import EventListener
from session_server.core.errors import EngineUnavailable
from session_server.core.events import EngineDied, EngineEvent, EngineReady
from session_server.engine.loop import EngineAssembly, EngineLoop

STOP_TIMEOUT_S: Final = 10.0
"""How long the step in flight may take to finish at the end."""

_T = TypeVar("_T")

_LOG: Final = logging.getLogger(__name__)


class InlineEngine:
    """An `EngineClient` whose engine shares this process.

    It is not restarted: a bug that ended the thread may have damaged the process around it.
    `failed` then resolves with the reason, and the server should leave with an error.
    """

    def __init__(self, build: Callable[[], EngineAssembly]) -> None:
        self._build = build
        self._loop: EngineLoop | None = None
        self._thread: threading.Thread | None = None
        self._listener: EventListener | None = None
        self._server: asyncio.AbstractEventLoop | None = None
        self.failed: asyncio.Future[str] | None = None

    async def start(self, listener: EventListener) -> EngineReady:
        """See `EngineClient.start`; the factory runs on a thread of its own."""
        assert self._thread is None, "an engine is started once"
        self._server = asyncio.get_running_loop()
        self.failed = self._server.create_future()
        self._listener = listener
        try:
            assembly = await asyncio.to_thread(self._build)
        except Exception as error:
            raise EngineUnavailable(f"the engine did not come up: {error}") from error
        self._loop = EngineLoop(assembly, self._emit)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        return assembly.ready

    def send(self, command: EngineCommand) -> None:
        """See `EngineClient.send`."""
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            raise EngineUnavailable("the engine is not running")
        try:
            self._loop.post(command, block=False)
        except queue.Full as error:
            raise EngineUnavailable("the engine's inbox is full") from error

    async def stop(self) -> None:
        """See `EngineClient.stop`."""
        if self._loop is None or self._thread is None:
            return
        if self._thread.is_alive():
            self._loop.post(Shutdown())
        # A step that hangs is not waited for: the thread is a daemon and ends with the process.
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - the thread ends, and the server is told
            _LOG.exception("the engine died of a bug")
            self._call(self._die, f"{type(error).__name__}: {error}")

    def _emit(self, events: list[EngineEvent]) -> None:
        self._call(self._deliver, events)

    def _deliver(self, events: list[EngineEvent]) -> None:
        assert self._listener is not None
        for event in events:
            self._listener(event)

    def _die(self, message: str) -> None:
        assert self._listener is not None
        assert self.failed is not None
        self._listener(EngineDied(message=message, will_restart=False))
        if not self.failed.done():
            self.failed.set_result(message)

    def _call(self, function: Callable[[_T], None], argument: _T) -> None:
        assert self._server is not None
        self._server.call_soon_threadsafe(function, argument)
