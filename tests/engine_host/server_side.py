"""A server reduced to what the clients' tests need: it listens and waits for ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cache.types import SessionId, TurnId
from session_server.core.commands import OpenSession, SubmitTurn
from session_server.core.engine_client import EngineClient
from session_server.core.events import (
    EngineDied,
    EngineEvent,
    EngineReady,
    TokensProduced,
    TurnFailed,
    TurnFinished,
)
from session_server.core.sampling import SamplingParams


class ServerSide:
    """Hears events in order."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self._news = asyncio.Event()

    def hear(self, event: EngineEvent) -> None:
        """The listener."""
        self.events.append(event)
        self._news.set()

    async def until(self, is_it: Callable[[EngineEvent], bool], *, start: int = 0) -> EngineEvent:
        """The first event from index `start` on that is the one."""
        async with asyncio.timeout(120):
            while True:
                for event in self.events[start:]:
                    if is_it(event):
                        return event
                self._news.clear()
                await self._news.wait()

    async def death(self) -> EngineDied:
        """The next engine's death, heard or to come."""
        event = await self.until(lambda e: isinstance(e, EngineDied))
        assert isinstance(event, EngineDied)
        return event

    async def revival(self) -> EngineReady:
        """The first restart."""
        event = await self.until(lambda e: isinstance(e, EngineReady))
        assert isinstance(event, EngineReady)
        return event

    async def turn(
        self, client: EngineClient, name: str, prompt: tuple[int, ...], max_tokens: int = 5
    ) -> list[int]:
        """Run one turn in a session of its own and give its outputs."""
        submit(client, name, prompt, max_tokens)
        end = await self.until(
            lambda e: isinstance(e, (TurnFinished, TurnFailed)) and e.turn_id == name
        )
        assert isinstance(end, TurnFinished), end
        return self.outputs(name)

    def outputs(self, name: str) -> list[int]:
        """The tokens heard of a turn."""
        return [
            token
            for event in self.events
            if isinstance(event, TokensProduced) and event.turn_id == name
            for token in event.token_ids
        ]


def submit(client: EngineClient, name: str, prompt: tuple[int, ...], max_tokens: int = 5) -> None:
    """Open a session of the turn's own and submit the turn."""
    session_id = SessionId(f"s-{name}")
    client.send(OpenSession(session_id=session_id, tenant_salt="a"))
    client.send(
        SubmitTurn(
            session_id=session_id,
            turn_id=TurnId(name),
            base_len=0,
            tokens=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
        )
    )
