"""A chaotic user of `session_server.client`: the library must hide all of this."""

from __future__ import annotations

import contextlib
from typing import Any

from session_server.client import (
    ClientOptions,
    ConnectionLost,
    SessionClient,
    TurnHandle,
    TurnText,
    connect,
)
from session_server.core.session_events import TokenInput
from tests.rig.history import Ask, End
from tests.rig.scene import Client, Scene, long_turn, some_turn

OPTIONS = ClientOptions(
    connect_timeout_s=5.0,
    first_attempts=30,
    max_attempts=30,
    first_delay_s=0.01,
    longest_delay_s=0.2,
)
WORDS = ("My name is Ada.", "What is my name?", "Count to five.", "Tell me something.")


class LibraryClient(Client):
    """Holds a conversation through the library and cuts its cable now and then."""

    def __init__(self, scene: Scene, number: int) -> None:
        super().__init__(scene, number)
        self._session: SessionClient | None = None

    async def run(self) -> None:
        """The whole life of the client."""
        deeds = (self.ask, self.cancel, self.lose_the_line, self.two_at_once, self.leave)
        try:
            for _ in range(self.chance.between(2, 4)):
                deed = self.chance.pick(deeds)
                self.scene.saw[f"library {deed.__name__}"] += 1
                with contextlib.suppress(ConnectionLost):
                    await deed()
        finally:
            if self._session is not None:
                self.scene.saw["library reconnects"] += self._session.num_reconnects
                await self._session.leave()

    async def ask(self) -> None:
        """A turn in words, and its answer."""
        await self._end(*await self._start(self.chance.pick(WORDS)))

    async def cancel(self) -> None:
        """A turn cancelled after some of its answer."""
        ask, turn = await self._start(long_turn(self.chance))
        await self._listen(turn, self.chance.magnitude(8))
        await turn.cancel(keep_partial=self.chance.happens(0.5))
        await self._end(ask, turn)

    async def lose_the_line(self) -> None:
        """The cable is pulled in the middle of a turn; the caller need not know."""
        ask, turn = await self._start(long_turn(self.chance))
        await self._listen(turn, self.chance.magnitude(8))
        (await self._connected()).abort_connection()
        await self._end(ask, turn)

    async def two_at_once(self) -> None:
        """The second turn waits behind the first."""
        first = await self._start(some_turn(self.chance))
        then = await self._start(some_turn(self.chance))
        await self._end(*then)
        await self._end(*first)

    async def leave(self) -> None:
        """Leave the session open and come back to it."""
        await (await self._connected()).leave()
        self._session = None
        await self.ask()

    async def _start(self, content: str | dict[str, Any]) -> tuple[Ask, TurnHandle]:
        session = await self._connected()
        body: dict[str, Any] = {"input": content} if isinstance(content, str) else content
        ask = self.new_ask(body)
        sampling = body.get("sampling", {"temperature": 0, "max_tokens": 24})
        words = content if isinstance(content, str) else TokenInput(tuple(content["input_ids"]))
        try:
            return ask, await session.start(words, sampling=sampling, turn_id=ask.turn_id)
        except ConnectionLost:
            self._lost()
            raise

    async def _listen(self, turn: TurnHandle, num_events: int) -> None:
        async for _ in turn:
            num_events -= 1
            if num_events < 0:
                return

    async def _end(self, ask: Ask, turn: TurnHandle) -> None:
        try:
            result = await turn.result()
        except ConnectionLost:
            self._lost()
            raise
        usage = result.usage
        end = End(result.status, result.text, usage.input_tokens, usage.output_tokens)
        self.hear_end(ask, end)
        rest = "".join([event.text async for event in turn if isinstance(event, TurnText)])
        if not turn.text.endswith(rest) or (result.text and turn.text != result.text):
            self.problem(f"{ask.turn_id}: heard {turn.text!r}, told {result.text!r}")

    async def _connected(self) -> SessionClient:
        if self._session is None:
            session_id = self.log.session_id or None
            self._session = await connect(self.scene.url, session_id=session_id, options=OPTIONS)
            self.log.session_id = self._session.session_id
        return self._session

    def _lost(self) -> None:
        """For good, as far as this object knows: somebody repeated our words and took over."""
        self.scene.saw["library lost its session"] += 1
        self._session = None
