"""The engine in a child process: start, supervise, restart.

The server keeps its event loop free of the engine's GIL. An engine that dies takes no session with
it: the server holds every session's tokens, and opens the session again in the next engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
from dataclasses import dataclass, field
from typing import Final

import msgspec

from session_server.core.child_process import start_child
from session_server.core.commands import EngineCommand, Shutdown
from session_server.core.engine_client import STOP_TIMEOUT_S, EventListener
from session_server.core.errors import EngineUnavailable
from session_server.core.events import EngineDied, EngineEvent, EnginePulse, EngineReady
from session_server.engine_host.event_slices import EVENTS_AT_ONCE, EventSlices
from session_server.engine_host.exit_codes import EXIT_UNUSABLE
from session_server.engine_host.restarts import RestartPolicy, Restarts
from session_server.engine_host.transport import Codec, FrameBuffer, TransportError, frame
from session_server.engine_host.watchdog import HANG_LIMIT_S, Watchdog

MAX_UNSENT_BYTES: Final = 256 << 20
"""Bytes of commands that an engine may leave unread before it counts as unavailable."""

READ_BYTES: Final = 1 << 16
"""Bytes of events read at a time. No more are read while more than a slice of them waits."""

DEATH_PATIENCE_S: Final = 1.0
"""Seconds that a child may take to exit after it closed its socket; clients wait for the news."""


_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Configure the child process.

    `argv`: its command line, to which the number of the inherited socket is appended; it must call
    `serve_engine` with that number. `settings`: the first frame, opaque here. `hang_limit_s`: an
    engine that has turns, none of which progresses for so long, is ended.
    """

    argv: tuple[str, ...]
    settings: bytes
    ready_timeout_s: float = 600.0
    stop_timeout_s: float = STOP_TIMEOUT_S
    hang_limit_s: float = HANG_LIMIT_S
    restarts: RestartPolicy = field(default_factory=RestartPolicy)


class EngineProcess:
    """Implement `EngineClient` with an engine in a child process.

    Each death is reported as `EngineDied`, each restart as `EngineReady` with the next epoch.
    `failed` resolves with the reason when the engine is not restarted any more. The server should
    then exit with an error, so that its own supervisor notices.
    """

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self._listener: EventListener | None = None
        self._child: _ChildConnection | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._epoch = 0
        self._restarts = Restarts(settings.restarts)
        self._is_stopping = False
        self.failed: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the engine that serves now; None if none does."""
        return self._child.process.pid if self._child is not None else None

    async def start(self, listener: EventListener) -> EngineReady:
        """Start the engine; see `EngineClient`. A first start that fails is not tried again."""
        assert self._supervisor is None, "an engine is started once"
        self._listener = listener
        self.failed = asyncio.get_running_loop().create_future()
        ready = await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        self._supervisor.add_done_callback(self._on_unsupervised)
        return ready

    def send(self, command: EngineCommand) -> None:
        """Send one command without blocking; see `EngineClient`."""
        if self._child is None:
            raise EngineUnavailable("the engine is not running")
        self._child.send(command)

    async def stop(self) -> None:
        """Ask the engine to shut down; close its socket and kill it if it does not."""
        self._is_stopping = True
        if self._child is not None:
            with contextlib.suppress(EngineUnavailable):
                self._child.send(Shutdown())
            await self._child.end(self._settings.stop_timeout_s)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])

    async def _spawn(self) -> EngineReady:
        assert self._listener is not None
        child = await _ChildConnection.begin(self._settings, self._listener)
        try:
            ready = await asyncio.wait_for(child.ready, self._settings.ready_timeout_s)
        except TimeoutError as error:
            await child.end(0.0)
            message = f"the engine was not ready after {self._settings.ready_timeout_s} s"
            raise EngineUnavailable(message) from error
        except EngineUnavailable as error:
            await child.end(DEATH_PATIENCE_S)
            error.is_final = child.process.returncode == EXIT_UNUSABLE
            raise
        except BaseException:
            await child.end(0.0)
            raise
        self._epoch += 1
        self._child = child
        return msgspec.structs.replace(ready, epoch=self._epoch)

    async def _supervise(self) -> None:
        assert self._listener is not None
        clock = asyncio.get_running_loop().time
        while self._child is not None:
            started_s = clock()
            watch = asyncio.create_task(self._child.watch(self._settings.hang_limit_s))
            try:
                reason = await self._child.lost
            finally:
                watch.cancel()
            child, self._child = self._child, None
            await child.end(DEATH_PATIENCE_S)
            if self._is_stopping:
                return
            lived_s = clock() - started_s
            self._restarts.note_death(lived_s, has_finished_turn=child.watchdog.has_finished_turn)
            self._report_death(f"{reason} (exit code {child.process.returncode})")
            await self._restart()

    async def _restart(self) -> None:
        assert self._listener is not None
        while not self._restarts.is_given_up:
            await asyncio.sleep(self._restarts.pause_s)
            try:
                ready = await self._spawn()
            except EngineUnavailable as error:
                self._restarts.note_failed_start()
                self._report_death(error.message)
            else:
                self._listener(ready)
                return

    def _report_death(self, message: str) -> None:
        assert self._listener is not None
        assert self.failed is not None
        will_restart = not self._restarts.is_given_up
        self._listener(EngineDied(message=message, will_restart=will_restart))
        if not will_restart and not self.failed.done():
            self.failed.set_result(message)

    def _on_unsupervised(self, supervisor: asyncio.Task[None]) -> None:
        """Report a broken supervisor: no other code would start the next engine."""
        assert self.failed is not None
        error = None if supervisor.cancelled() else supervisor.exception()
        if error is not None and not self.failed.done():
            _LOG.error("the engine's supervisor failed", exc_info=error)
            self.failed.set_result(f"its supervisor failed: {type(error).__name__}: {error}")


class _ChildConnection(asyncio.BufferedProtocol):
    """Hold one child and its socket, from start to end. `lost` resolves with why it ended."""

    def __init__(self, process: subprocess.Popen[bytes], listener: EventListener) -> None:
        loop = asyncio.get_running_loop()
        self.process = process
        self.ready: asyncio.Future[EngineReady] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()
        self._listener = listener
        self._codec = Codec()
        self._buffer = FrameBuffer()
        self._events = EventSlices(self._handle, on_failed=self._fail, on_empty=self._read_on)
        self._received = memoryview(bytearray(READ_BYTES))
        self._transport: asyncio.Transport | None = None
        self.watchdog = Watchdog(listener)
        self._death_message = "the engine process ended without a message"

    @classmethod
    async def begin(cls, settings: ProcessSettings, listener: EventListener) -> _ChildConnection:
        """Start a child and send it its settings.

        Raises:
            EngineUnavailable: the program could not be started.
        """
        try:
            ours, process = await asyncio.to_thread(start_child, settings.argv)
        except OSError as error:
            raise EngineUnavailable(f"the engine process did not start: {error}") from error
        loop = asyncio.get_running_loop()
        _, child = await loop.create_unix_connection(lambda: cls(process, listener), sock=ours)
        assert child._transport is not None
        child._transport.write(frame(settings.settings))
        return child

    def send(self, command: EngineCommand) -> None:
        """Send one command without blocking; see `EngineClient`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise EngineUnavailable("the engine is gone")
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise EngineUnavailable("the engine does not take commands")
        transport.write(self._codec.command_frame(command))
        self.watchdog.note_command(command)

    async def watch(self, hang_limit_s: float) -> None:
        """Abort the child once no turn progresses: it first prints the stacks of its threads."""
        await self.watchdog.wait_until_hung(hang_limit_s)
        self._death_message = f"the engine moved no turn for {hang_limit_s:g} s"
        self.process.send_signal(signal.SIGABRT)
        await asyncio.sleep(DEATH_PATIENCE_S)
        self.process.kill()  # a stopped process reacts to no other signal

    async def end(self, patience_s: float) -> None:
        """Wait for the child to exit by itself, then kill it, and close its socket."""
        try:
            await asyncio.to_thread(self.process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; asyncio calls this once."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes; asyncio fills it."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """Take the bytes that have arrived; asyncio calls this."""
        assert self._transport is not None
        try:
            for payload in self._buffer.feed(self._received[:nbytes]):
                self._events.add(self._codec.events(payload))
        except TransportError as error:
            self._death_message = str(error)
            self._transport.abort()
        if len(self._events) > EVENTS_AT_ONCE:
            self._transport.pause_reading()

    def _read_on(self) -> None:
        assert self._transport is not None
        self._transport.resume_reading()

    def _handle(self, event: EngineEvent) -> None:
        match event:
            case EngineReady():
                if not self.ready.done():  # else the start has timed out
                    self.ready.set_result(event)
            case EngineDied(message=message):
                self._death_message = message
            case EnginePulse():
                self.watchdog.note_event(event)
            case _:
                self.watchdog.note_event(event)
                self._listener(event)

    def _fail(self, error: Exception) -> None:
        """End an engine of whose events some are lost."""
        _LOG.error("an event of the engine could not be handled", exc_info=error)
        assert self._transport is not None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Resolve `ready` and `lost`; asyncio calls this once, last."""
        self._events.finish()
        if not self.ready.done():
            self.ready.set_exception(EngineUnavailable(self._death_message))
        if not self.lost.done():  # a second Ctrl-C cancels whoever awaits it
            self.lost.set_result(self._death_message)
