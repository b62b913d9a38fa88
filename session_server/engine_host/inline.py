"""The engine on a thread of the server's process: for tests, debugging and small machines."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import queue
import sys
import threading
from collections.abc import Callable
from typing import Final

from session_server.core.commands import EngineCommand, Shutdown
from session_server.core.engine_client import STOP_TIMEOUT_S, EventListener
from session_server.core.errors import EngineUnavailable
from session_server.core.events import EngineDied, EngineEvent, EngineReady
from session_server.engine_host.event_slices import EventSlices
from session_server.engine_host.loop import EngineAssembly, EngineLoop
from session_server.engine_host.watchdog import HANG_LIMIT_S, Watchdog

_LOG: Final = logging.getLogger(__name__)


class InlineEngine:
    """Implement `EngineClient` with an engine on a thread of this process.

    It is not restarted: the exception that ended the thread may have damaged the process, and a
    thread that hangs cannot be ended. `hang_limit_s`: how long no turn may progress. `failed`
    resolves with the reason, and the server should then exit with an error.
    """

    def __init__(
        self,
        build: Callable[[], EngineAssembly],
        *,
        hang_limit_s: float = HANG_LIMIT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        """`stop_timeout_s`: how long `stop` waits for the engine's thread."""
        self._build = build
        self._hang_limit_s, self._stop_timeout_s = hang_limit_s, stop_timeout_s
        self._watchdog: Watchdog | None = None
        self._watch: asyncio.Task[None] | None = None
        self._loop: EngineLoop | None = None
        self._thread: threading.Thread | None = None
        self._events = EventSlices(self._handle, on_failed=self._fail)
        self._listener: EventListener | None = None
        self._server: asyncio.AbstractEventLoop | None = None
        self.failed: asyncio.Future[str] | None = None

    async def start(self, listener: EventListener) -> EngineReady:
        """Build the engine on a thread of its own, then start it; see `EngineClient`."""
        assert self._thread is None, "an engine is started once"
        self._server = asyncio.get_running_loop()
        self.failed = self._server.create_future()
        self._listener = listener
        self._watchdog = Watchdog(listener)
        try:
            assembly = await asyncio.to_thread(self._build)
        except Exception as error:
            raise EngineUnavailable(f"the engine did not come up: {error}") from error
        self._loop = EngineLoop(assembly, self._emit)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        watching = self._give_up_when_hung(self._watchdog, self._loop)
        self._watch = asyncio.create_task(watching, name="engine-watchdog")
        return assembly.ready

    def send(self, command: EngineCommand) -> None:
        """Queue one command without blocking; see `EngineClient`."""
        is_alive = self._thread is not None and self._thread.is_alive()
        if self._loop is None or not is_alive or self._is_given_up:
            raise EngineUnavailable("the engine is not running")
        try:
            self._loop.post(command, block=False)
        except queue.Full as error:
            raise EngineUnavailable("the engine's inbox is full") from error
        assert self._watchdog is not None, "a loop has a watchdog"
        self._watchdog.note_command(command)

    async def stop(self) -> None:
        """Ask the engine to shut down, and wait for it a while. Idempotent."""
        if self._loop is None or self._thread is None:
            return
        if self._watch is not None:
            self._watch.cancel()
        with contextlib.suppress(queue.Full):
            self._loop.post(Shutdown(), block=False)
        # Do not wait for a step that hangs: the thread is a daemon and ends with the process.
        await asyncio.to_thread(self._thread.join, self._stop_timeout_s)
        self._events.finish()

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run()
        except BaseException as error:  # noqa: BLE001 - the thread ends, and the server is told
            _LOG.exception("the engine ended with an exception")
            assert self._server is not None
            self._server.call_soon_threadsafe(self._die, f"{type(error).__name__}: {error}")

    def _emit(self, events: list[EngineEvent]) -> None:
        assert self._server is not None
        self._server.call_soon_threadsafe(self._events.add, events)

    def _handle(self, event: EngineEvent) -> None:
        assert self._listener is not None
        assert self._watchdog is not None
        if not self._is_given_up:
            self._watchdog.note_event(event)
            self._listener(event)

    def _fail(self, error: Exception) -> None:
        """End an engine of whose events some are lost."""
        _LOG.error("an event of the engine could not be handled", exc_info=error)
        self._die(f"{type(error).__name__}: {error}")

    async def _give_up_when_hung(self, watchdog: Watchdog, loop: EngineLoop) -> None:
        await watchdog.wait_until_hung(self._hang_limit_s, pulse=loop.pulse)
        faulthandler.dump_traceback(sys.stderr)
        self._die(f"the engine moved no turn for {self._hang_limit_s:g} s")

    @property
    def _is_given_up(self) -> bool:
        return self.failed is not None and self.failed.done()

    def _die(self, message: str) -> None:
        assert self._listener is not None
        assert self.failed is not None
        self._events.finish()
        if not self._is_given_up:
            if self._watch is not None:
                self._watch.cancel()
            self.failed.set_result(message)
            self._listener(EngineDied(message=message, will_restart=False))
