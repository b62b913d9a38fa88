"""An engine client that lets others listen: the events go to them first, then to the listener."""

from __future__ import annotations

from collections.abc import Sequence

from session_server.core.commands import EngineCommand
from session_server.core.engine_client import EngineClient, EventListener
from session_server.core.events import EngineEvent, EngineReady


class ObservedEngine:
    """Wraps an `EngineClient`. Observers must be quick, and must not raise."""

    def __init__(self, engine: EngineClient, observers: Sequence[EventListener]) -> None:
        self._engine = engine
        self._observers = tuple(observers)

    async def start(self, listener: EventListener) -> EngineReady:
        """Bring the engine up; observers hear its events too."""

        def tell(event: EngineEvent) -> None:
            for observer in self._observers:
                observer(event)
            listener(event)

        return await self._engine.start(tell)

    def send(self, command: EngineCommand) -> None:
        """Queue one command; never blocks."""
        self._engine.send(command)

    async def stop(self) -> None:
        """End the engine and wait for it."""
        await self._engine.stop()
