"""The engine's own process: read commands from an inherited socket, write events to it.

The process ends when it is told to, when the server is gone, or when an exception escapes. One that
hangs is ended by its supervisor. It never outlives the server, and ignores signals meant for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

from session_server.core.commands import Shutdown
from session_server.core.events import EngineDied, EngineEvent
from session_server.engine_host.exit_codes import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_ORPHANED,
    EXIT_UNUSABLE,
)
from session_server.engine_host.loop import EngineAssembly, EngineLoop
from session_server.engine_host.transport import Codec, FrameBuffer
from session_server.engine_host.watchdog import PULSE_INTERVAL_S

READ_BYTES: Final = 1 << 18

ORPHAN_GRACE_S: Final = 5.0
"""Seconds that the forwards in flight may take to finish once the server is gone."""


class CannotStart(Exception):
    """Refuse settings that no engine can serve; the message is shown without a stack."""


EngineFactory = Callable[[bytes], EngineAssembly]
"""Build an engine from the settings frame.

Raises:
    CannotStart: these settings allow no engine.
"""


def serve_engine(fd: int, build: EngineFactory) -> int:
    """Serve the socket `fd` until `Shutdown` or its peer is gone, and return the exit code."""
    # A supervisor that sees no progress sends SIGABRT. Then every thread's stack goes to stderr,
    # which needs neither the interpreter lock nor a running thread.
    faulthandler.enable()
    # A service manager's signal reaches every process of the service; only the server decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=fd) as connection:
        return _Child(connection).serve(build)


class _Child:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._codec = Codec()
        self._buffer = FrameBuffer()
        self._loop: EngineLoop | None = None
        self._sending = threading.Lock()

    def serve(self, build: EngineFactory) -> int:
        settings = self._read_settings()
        if settings is None:
            return EXIT_ORPHANED
        reader = threading.Thread(target=self._read_commands, name="engine-reader", daemon=True)
        reader.start()
        try:
            assembly = build(settings)
            self._loop = EngineLoop(assembly, self._emit)
            self._emit([assembly.ready])
            threading.Thread(
                target=self._send_pulses, args=(self._loop,), name="engine-pulse", daemon=True
            ).start()
            self._loop.run()
        except (BrokenPipeError, ConnectionResetError):
            return EXIT_ORPHANED
        except CannotStart as error:
            self._report_death(str(error))
            return EXIT_UNUSABLE
        except BaseException as error:  # noqa: BLE001 - reported to the server, then the end
            # Report first: stderr may be a full pipe, and printing would block.
            self._report_death(f"{type(error).__name__}: {error}")
            traceback.print_exc()
            return EXIT_BUG
        return EXIT_OK

    def _receive(self) -> bytes:
        """Return what the server sends next; nothing once it is gone, in whatever way."""
        try:
            return self._socket.recv(READ_BYTES)
        except ConnectionError:  # killed with what this process has sent still unread
            return b""

    def _read_settings(self) -> bytes | None:
        while data := self._receive():
            if payloads := self._buffer.feed(data):
                assert len(payloads) == 1, "the server sends commands after EngineReady"
                return payloads[0]
        return None

    def _read_commands(self) -> None:
        try:
            while data := self._receive():
                commands = [self._codec.command(payload) for payload in self._buffer.feed(data)]
                assert self._loop is not None, "the server sends commands after EngineReady"
                self._loop.take(commands)
        except BaseException:  # noqa: BLE001 - no command can be read any more
            if self._socket.fileno() < 0:
                return  # `serve` has returned and closed the socket: the process exits as it says
            traceback.print_exc()
        if self._loop is not None:
            with contextlib.suppress(queue.Full):
                self._loop.post(Shutdown(), block=False)
            time.sleep(ORPHAN_GRACE_S)
        # No server is left, so do not wait for an engine that is half built or stuck.
        os._exit(EXIT_ORPHANED)

    def _send_pulses(self, loop: EngineLoop) -> None:
        """Tell the server several times a second whether steps are completed.

        Silence tells it that this process is stopped, or that something holds the interpreter.
        """
        try:
            while True:
                time.sleep(PULSE_INTERVAL_S)
                self._emit([loop.pulse()])
        except OSError:
            # The server is gone. The thread that would read so may be in a step that hangs.
            time.sleep(ORPHAN_GRACE_S)
            os._exit(EXIT_ORPHANED)
        except BaseException:  # noqa: BLE001 - without pulses the engine would count as stalled
            traceback.print_exc()
            os._exit(EXIT_BUG)

    def _emit(self, events: list[EngineEvent]) -> None:
        with self._sending:
            for each in self._codec.event_frames(events):
                self._socket.sendall(each)

    def _report_death(self, message: str) -> None:
        try:
            self._emit([EngineDied(message=message, will_restart=False)])
        except OSError:
            print("the server is gone, so this error cannot be reported to it", file=sys.stderr)
