"""Fuzzed requests and frames to a server over real sockets: no answer is the server's fault."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final
from urllib.parse import quote

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from session_server.web.asyncapi import CHANNELS
from tests.fuzz.draw import Draw
from tests.fuzz.protocols import BODY_SCHEMAS, DOCUMENTS, FRAME_SCHEMAS
from tests.web.wire_client import http_client

FRAMES_PER_SOCKET: Final = 250
SESSIONS: Final = tuple(f"s_{number}" for number in range(1, 9))
TEXTS: Final = (*SESSIONS, "Hello.", "user", "", "\x00", "é", "t_1", "paper")
OWN_CODES: Final = frozenset({1011})
"""Close codes that say that the server has a bug."""


@dataclass
class Shots:
    """What was answered, and what should not have been."""

    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.answers.values())


class WireFuzz:
    """Fuzz one server."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = Random(seed)
        self._bodies = Draw(self._random, BODY_SCHEMAS, TEXTS)
        self._frames = [
            (channel, Draw(self._random, FRAME_SCHEMAS[channel.name], TEXTS))
            for channel in CHANNELS
        ]
        self._operations = [
            (method, path, operation)
            for path, methods in DOCUMENTS["openapi.json"]["paths"].items()
            for method, operation in methods.items()
        ]
        self.shots = Shots()

    async def run(self, num_shots: int, *, workers: int = 8) -> Shots:
        """Send so many requests and frames, half of each."""
        async with http_client(self._url) as http:

            async def work() -> None:
                while self.shots.total < num_shots:
                    if self._random.random() < 1 / (FRAMES_PER_SOCKET + 1):
                        await self._open_again(http)
                        await self._use_socket()
                    else:
                        await self._request(http)

            await self._open_again(http)
            await asyncio.gather(*(work() for _ in range(workers)))
        return self.shots

    async def _open_again(self, http: httpx.AsyncClient) -> None:
        """Open the sessions that were closed, with bodies that are right."""
        for name in SESSIONS:
            await http.post("/v1/sessions", json={"id": name})

    async def _request(self, http: httpx.AsyncClient) -> None:
        method, path, operation = self._random.choice(self._operations)
        drawn = self._arguments(path, operation)
        try:
            async with http.stream(method, **drawn) as answer:
                if "event-stream" not in answer.headers.get("content-type", ""):
                    await answer.aread()
                self._note(answer.status_code, f"{method} {drawn}")
        except httpx.TimeoutException:
            self.shots.answers["none"] += 1
            self.shots.problems.append(f"{method} {drawn} -> no answer in time")

    def _note(self, status: int, asked: str) -> None:
        self.shots.answers[str(status)] += 1
        if status >= 500:
            self.shots.problems.append(f"{asked} -> {status}")

    def _arguments(self, path: str, operation: dict[str, Any]) -> dict[str, Any]:
        random = self._random
        query: dict[str, str] = {}
        headers: dict[str, str] = {}
        for parameter in operation.get("parameters", ()):
            name, text = parameter["name"], str(self._bodies.value(parameter["schema"]))
            if random.random() < 0.2:
                text = str(self._bodies.odd())
            text = text.encode(errors="replace").decode()
            if parameter["in"] == "path":
                known = random.choice(SESSIONS) if random.random() < 0.7 else text
                path = path.replace(f"{{{name}}}", quote(known, safe="") or "x")
            elif random.random() < 0.4 and parameter["in"] == "query":
                query[name] = text
            elif random.random() < 0.2 and text.isprintable() and text.isascii():
                headers[name] = text.strip()
        drawn: dict[str, Any] = {"url": path, "params": query, "headers": headers}
        body = operation.get("requestBody")
        if body is not None:
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            drawn["content"] = self._bodies.payload(name)
            kinds = ("application/json",) * 9 + ("text/plain",)
            headers["content-type"] = random.choice(kinds)
        return drawn

    async def _use_socket(self) -> None:
        try:
            await self._speak()
        except InvalidStatus as refused:
            self._note(refused.response.status_code, "handshake")

    async def _speak(self) -> None:
        channel, frames = self._random.choice(self._frames)
        name = self._random.choice((*SESSIONS, "new"))
        path = channel.address.replace("{session_id}", name)
        address = self._url.replace("http", "ws", 1) + path
        with contextlib.suppress(ConnectionClosed, OSError):
            async with connect(
                address, subprotocols=[Subprotocol(channel.name)], compression=None, proxy=None
            ) as socket:
                reading = asyncio.create_task(_read_all(socket))
                try:
                    for _ in range(FRAMES_PER_SOCKET):
                        payload = frames.payload("ClientMessage")
                        await socket.send(payload.decode(errors="replace"))
                        self.shots.answers["frame"] += 1
                finally:
                    await socket.close()
                    await reading
                    self._check_close(socket)

    def _check_close(self, socket: ClientConnection) -> None:
        self.shots.answers[f"close {socket.close_code}"] += 1
        if socket.close_code in OWN_CODES:
            self.shots.problems.append(f"socket closed with {socket.close_code}")


async def _read_all(socket: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.recv()
