"""A chaotic client of REST and server-sent events, which tries again whatever got lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from tests.rig.history import Ask, End
from tests.rig.scene import QUIET_S, Client, Scene, long_turn, some_turn
from tests.web.wire_client import http_client

LOST = (httpx.TransportError,)


class RestClient(Client):
    """Opens with an idempotency key, runs turns as JSON and as events, cancels over REST."""

    def __init__(self, scene: Scene, number: int) -> None:
        super().__init__(scene, number)
        self._number = number

    async def run(self) -> None:
        """The whole life of the client."""
        deeds = (self.ask, self.stream, self.hang_up, self.cancel)
        async with http_client(self.scene.url, timeout_s=QUIET_S) as self._http:
            key = {"idempotency-key": f"{self.scene.seed}-{self._number}"}
            answer = await self._insist("POST", "/v1/sessions", json={}, headers=key)
            self.log.session_id = answer.json()["id"]
            for _ in range(self.chance.between(2, 3)):
                deed = self.chance.pick(deeds)
                self.scene.saw[f"rest {deed.__name__}"] += 1
                await deed()

    async def ask(self) -> None:
        """A turn as one request; sent again, it is the same turn."""
        ask = self._new_ask(some_turn(self.chance, on_disconnect=self._on_disconnect()))
        self._hear(ask, (await self._insist("POST", self._path("turns"), json=ask.body)).json())

    async def stream(self) -> None:
        """A turn as a stream of events."""
        ask = self._new_ask(some_turn(self.chance, on_disconnect=self._on_disconnect()))
        with contextlib.suppress(*LOST):
            async for frame in self._events(ask):
                self.hear_turn(ask, frame)
        await self._know(ask)

    async def hang_up(self) -> None:
        """A stream that its reader leaves, which ends the turn."""
        ask = self._new_ask(long_turn(self.chance))
        wanted = self.chance.magnitude(12)
        with contextlib.suppress(*LOST):
            async with contextlib.aclosing(self._events(ask)) as events:
                async for frame in events:
                    self.hear_turn(ask, frame)
                    wanted -= 1
                    if wanted < 0:
                        break
        await self._know(ask)

    async def cancel(self) -> None:
        """A turn that runs as one request while another one cancels it."""
        ask = self._new_ask(long_turn(self.chance, on_disconnect="detach"))
        running = asyncio.create_task(self.know_by_asking(ask))
        await asyncio.sleep(self.chance.share() / 20)
        body = {"keep_partial": self.chance.happens(0.5)}
        with contextlib.suppress(*LOST):
            answer = await self._http.post(self._path("turns", ask.turn_id, "cancel"), json=body)
            self.scene.saw[f"rest cancel {answer.status_code}"] += 1
        await running

    async def know_by_asking(self, ask: Ask) -> None:
        """Ask until the end of the turn is the answer."""
        self._hear(ask, (await self._insist("POST", self._path("turns"), json=ask.body)).json())

    async def _know(self, ask: Ask) -> None:
        """Ask again, unless the end was heard already: a turn id makes that harmless."""
        if ask.end is None:
            await self.know_by_asking(ask)

    async def _events(self, ask: Ask) -> AsyncGenerator[dict[str, Any], None]:
        headers = {"accept": "text/event-stream"}
        request = self._http.stream("POST", self._path("turns"), json=ask.body, headers=headers)
        async with request as answer:
            if answer.status_code != 200:
                self.problem(f"{ask.turn_id}: {answer.status_code} {await answer.aread()!r}")
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    async def _insist(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send until there is an answer."""
        while True:
            try:
                answer = await self._http.request(method, path, **request)
            except LOST as error:
                self.scene.saw[f"request lost by {type(error).__name__}"] += 1
                await asyncio.sleep(0.02)
                continue
            if answer.is_success:
                return answer
            self.problem(f"{method} {path}: {answer.status_code} {answer.text}")
            answer.raise_for_status()

    def _new_ask(self, body: dict[str, Any]) -> Ask:
        turn_id = f"t{len(self.log.asks)}"
        return self.log.ask(turn_id, body | {"turn_id": turn_id})

    def _on_disconnect(self) -> str:
        return self.chance.pick(("detach", "cancel"))

    def _path(self, *parts: str) -> str:
        return "/".join(("/v1/sessions", self.log.session_id, *parts))

    def _hear(self, ask: Ask, result: dict[str, Any]) -> None:
        usage, text = result["usage"], result["item"]["content"]
        end = End(result["status"], text, usage["input_tokens"], usage["output_tokens"])
        self.hear_end(ask, end)
