"""`EngineClient`: the server's side of an engine: send commands, receive events.

Two implementations exist, a child process and a thread; `wiring` chooses. Listeners are called on
the event loop's thread, in order, one event at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from session_server.core.commands import EngineCommand
from session_server.core.events import EngineEvent, EngineReady

STOP_TIMEOUT_S: Final = 10.0
"""Seconds that the forwards in flight may take to finish when the engine stops."""

EventListener = Callable[[EngineEvent], None]


class EngineClient(Protocol):
    """Drive one engine, in a child process or on a thread."""

    async def start(self, listener: EventListener) -> EngineReady:
        """Start the engine, and begin to deliver events.

        Raises:
            EngineUnavailable: it did not start; the message says why.
        """

    def send(self, command: EngineCommand) -> None:
        """Queue one command without blocking.

        Raises:
            EngineUnavailable: no engine runs at the moment.
        """

    async def stop(self) -> None:
        """End the engine and wait for it. Idempotent."""
