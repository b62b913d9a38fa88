"""The server's view of an engine: send commands, hear events.

Two implementations exist, a child process and a thread; `wiring` chooses. Listeners are called on
the event loop's thread, in order, one event at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from session_server.core.commands import EngineCommand
from session_server.core.events import EngineEvent, EngineReady

EventListener = Callable[[EngineEvent], None]


class EngineClient(Protocol):
    """One engine, however it runs."""

    async def start(self, listener: EventListener) -> EngineReady:
        """Bring the engine up and begin to deliver events.

        Raises:
            EngineUnavailable: it did not come up; the message says why.
        """
        ...

    def send(self, command: EngineCommand) -> None:
        """Queue one command; never blocks.

        Raises:
            EngineUnavailable: there is no engine at the moment.
        """
        ...

    async def stop(self) -> None:
        """End the engine and wait for it; idempotent."""
        ...
