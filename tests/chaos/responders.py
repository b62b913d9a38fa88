"""Clients of Responses and of conversations that live through crashes and remember what they were
told: it is there for ever and as it was told, or gone for ever once they have deleted it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

from session_server.local_server import LocalServer
from tests.chaos.crashes import LOST, TOLD, Place, Town
from tests.rig.decisions import Decisions

WORDS = ("red", "green", "blue", "seven", "eight", "north", "south")
MAX_TOLD = 6
"""A client that was told so many responses deletes all but a few."""


@dataclass
class Told:
    """A response as its client was told of it."""

    body: dict[str, Any]
    said: str
    previous: str | None

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def essence(self) -> tuple[str, int]:
        """What the same question has for an answer whenever it is asked."""
        return text_of(self.body), self.body["usage"]["input_tokens"]


def text_of(body: dict[str, Any]) -> str:
    return "".join(part["text"] for item in body["output"] for part in item["content"])


class Responder:
    """One user with responses, and one conversation."""

    def __init__(self, town: Place, number: int) -> None:
        self.town, self.report, self.number = town, town.report, number
        self.chance = Decisions(town.chance.below(1 << 30), number)
        self.told: list[Told] = []
        self.gone: list[str] = []
        self.conversation: str | None = None
        self.items: list[tuple[str, str]] = []
        self.asked: str | None = None

    async def run(self) -> None:
        """Live until the last server has run for a while."""
        while not self.town.is_over:
            url = await self.town.place()
            try:
                async with asyncio.timeout(30):
                    await self.visit(url)
            except LOST as error:
                self.town.lost(error)
                await asyncio.sleep(0.02)

    async def visit(self, url: str) -> None:
        """Compare what is there with what was told, then go on until the server dies."""
        async with self._http(url) as http:
            await self._is_as_remembered(http)
            if self.conversation is None:
                answer = await http.post("/v1/conversations", json={})
                self.conversation = answer.json()["id"] if answer.status_code == 200 else None
            while not (self.town.is_over or self._leaves()):
                await self._ask(http)
                if self.conversation is not None and self.chance.happens(0.4):
                    await self._converse(http)
                if len(self.told) > MAX_TOLD:
                    await self._delete(http)

    def _leaves(self) -> bool:
        return False

    def _http(self, url: str) -> httpx.AsyncClient:
        return self.town.http(url)

    async def _ask(self, http: httpx.AsyncClient) -> None:
        """Go on from some response, or ask again what was asked."""
        again = self.chance.pick(self.told) if self.told and self.chance.happens(0.2) else None
        if again is not None and again.previous in (None, *(each.id for each in self.told)):
            previous, said = again.previous, again.said
        else:
            again, said = None, self.chance.pick(WORDS)
            newest = self.told[-1].id if self.told else None
            previous = newest if self.chance.happens(0.7) or not self.told else None
        body = await self._answer(http, said, previous_response_id=previous)
        if body is None:
            return
        told = Told(body, said, previous)
        if again is not None:
            self.report.saw["asked again"] += 1
            if told.essence != again.essence:
                self._complain(f"{again.id} said {again.essence}, {told.id} {told.essence}")
        self.told.append(told)

    async def _converse(self, http: httpx.AsyncClient) -> None:
        self.asked = self.chance.pick(WORDS)
        body = await self._answer(http, self.asked, conversation=self.conversation)
        if body is not None:
            self.items += [("user", self.asked), ("assistant", text_of(body))]
            self.report.saw["conversed"] += 1
            self.asked = None

    async def _answer(
        self, http: httpx.AsyncClient, said: str, **options: Any
    ) -> dict[str, Any] | None:
        """A response that its client was told is on disk; None if it was refused or failed."""
        asked = {"input": said, "max_output_tokens": 6, "temperature": 0, **options}
        answer = await http.post("/v1/responses", json=asked)
        if answer.status_code != 200:
            self.report.saw[f"refused: {answer.json()['error']['code']}"] += 1
            if answer.status_code == 404:
                self._complain(f"{options} is gone: {answer.text}")
            return None
        body: dict[str, Any] = answer.json()
        if body["durable"] is not True:
            self._complain(f"{body['id']} is not on disk: {body['status']}")
        self.report.saw[TOLD] += 1
        return body

    async def _delete(self, http: httpx.AsyncClient) -> None:
        while len(self.told) > 3:
            name = self.told.pop(0).id  # it may be there or not until the answer comes
            answer = await http.delete(f"/v1/responses/{name}")
            if answer.status_code != 200:
                self._complain(f"{name} cannot be deleted: {answer.text}")
            self.gone.append(name)
            self.report.saw["deleted"] += 1

    async def _is_as_remembered(self, http: httpx.AsyncClient) -> None:
        for told in self.told:
            found = await http.get(f"/v1/responses/{told.id}")
            if (found.status_code, found.json()) != (200, told.body):
                self._complain(f"told {told.body}, found {found.text}")
            self.report.saw["shown again"] += 1
        for name in self.gone[-4:]:
            found = await http.get(f"/v1/responses/{name}")
            if found.status_code != 404:
                self._complain(f"{name} was deleted, and is there")
        if self.conversation is None:
            return
        found = await http.get(
            f"/v1/conversations/{self.conversation}/items", params={"order": "asc", "limit": 100}
        )
        if found.status_code != 200:
            self._complain(f"{self.conversation}: {found.text}")
            return
        items = [(item["role"], item["content"][0]["text"]) for item in found.json()["data"]]
        if self.asked is not None and len(items) == len(self.items) + 2:
            self.report.saw["there, and not told of"] += 1
            self.items += [("user", self.asked), items[-1]]
        self.asked = None
        if items != self.items[:100]:
            self._complain(f"{self.conversation}: told {self.items}, found {items}")
        if len(self.items) > 60:
            answer = await http.delete(f"/v1/conversations/{self.conversation}")
            assert answer.status_code == 200
            self.conversation, self.items = None, []

    def _complain(self, problem: str) -> None:
        self.report.problems.append(f"responder {self.number}: {problem}")


async def crash_responders(town: Town, *, cycles: int, clients: int = 8) -> Counter[str]:
    """Let clients live through so many servers, and look once more at what the last one has."""
    responders = [Responder(town, number) for number in range(clients)]
    lives = [asyncio.create_task(each.run()) for each in responders]
    try:
        last: LocalServer = await town.cycles(cycles)
        await asyncio.gather(*lives)
        for each in responders:
            await each.visit(last.url)
        town.report.saw[f"exit {await asyncio.to_thread(last.stop)}"] += 1
    finally:
        for life in lives:
            life.cancel()
    return town.report.saw
