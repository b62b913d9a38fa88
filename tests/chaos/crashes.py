"""Kill servers and engines at random moments under clients that remember what they were told.

`python -m tests.chaos.crashes --cycles 1000`: sixteen sockets and requests over real processes and
one store. The clients' own memory is the judge, not the server's books: a turn that was told to be
on disk is there for ever, once, and as it was told; one that was on its way may be there or not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pprint
from typing import Any, Protocol

import httpx
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from session_server.local_server import LocalServer
from tests.rig.decisions import Decisions
from tests.rig.echo_server import echo_server
from tests.rig.history import ENDS
from tests.rig.processes import ECHO_ENGINE, engines_of
from tests.rig.scene import echo_turn
from tests.web.wire_client import Wire, greeted, http_client

LOST = (OSError, TimeoutError, EOFError, ConnectionClosed, InvalidHandshake, httpx.TransportError)
FLAGS = ("--max-total-tokens", "16000", "--session-ttl", "86400")
TOLD = "told that it is on disk"
MAX_TURNS = 24
MAX_TOKENS = 400
"""A client whose session has so many begins another one, so that histories stay short and within
the context of the echo engine."""


@dataclass
class Report:
    """What happened, and what must not have."""

    saw: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)


class Place(Protocol):
    """Where a client lives: `is_over` once the last servers have begun, which are not killed."""

    report: Report
    chance: Decisions
    is_over: bool

    async def place(self) -> str:
        """Wait for a server, and return its URL."""
        ...

    def http(self, url: str, *, timeout_s: float = 20) -> httpx.AsyncClient:
        """Return a client for requests to a server."""
        return http_client(url, timeout_s=timeout_s)

    def lost(self, error: BaseException) -> None:
        """Be told how a visit to a server has ended."""
        self.report.saw["connection lost"] += 1


@dataclass
class Town(Place):
    """The one server there is at the moment, made by `serve`, with an engine process whose command
    line has `engine` in it. `url` is None while there is none. `between` is called when one is
    dead. Each lives until clients were told of up to `num_told` more things."""

    store: Path
    report: Report
    chance: Decisions
    flags: tuple[str, ...] = ()
    between: Callable[[Path], None] = lambda _store: None
    serve: Callable[[Sequence[str]], LocalServer] = echo_server
    engine: str = ECHO_ENGINE
    num_told: int = 0
    url: str | None = None
    is_over: bool = False

    async def cycles(self, count: int) -> LocalServer:
        """Start and kill so many servers, then one that lives; return that."""
        for _ in range(count):
            server = await self._start()
            kind = signal.SIGTERM if self.chance.happens(0.1) else signal.SIGKILL
            self.url = None
            os.kill(server.pid, kind)
            self.report.saw[f"server {kind.name}"] += 1
            await asyncio.to_thread(server.wait, timeout_s=60)
            self.between(self.store)
        last = await self._start()
        self.is_over = True
        return last

    async def _start(self) -> LocalServer:
        """Start a server, let it live for a while, and kill its engine perhaps."""
        begun_s = time.monotonic()
        server = self.serve([*FLAGS, "--store", str(self.store), *self.flags])
        await asyncio.to_thread(server.__enter__)
        self.report.ready_s.append(time.monotonic() - begun_s)
        self.url = server.url
        num_wanted = self.report.saw[TOLD] + self.chance.between(0, self.num_told)
        while self.report.saw[TOLD] < num_wanted:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1 + self.chance.share())
        if self.chance.happens(0.3):
            for pid in engines_of(server.pid, self.engine):
                os.kill(pid, signal.SIGKILL)
            self.report.saw["engine killed"] += 1
            await asyncio.sleep(self.chance.share())
        return server

    async def place(self) -> str:
        """Wait for a server."""
        while self.url is None:
            await asyncio.sleep(0.01)
        return self.url


@dataclass
class Remembered:
    """A turn as its client was told of it."""

    turn_id: str
    body: dict[str, Any]
    end: dict[str, Any]


class Client:
    """One user with one session at a time. A visit to a server ends after `patience_s`."""

    patience_s = 30.0

    def __init__(self, town: Place, number: int) -> None:
        self.town, self.report = town, town.report
        self.chance = Decisions(town.chance.below(1 << 30), number)
        self.number = number
        self.num_asked = 0
        self._forget()

    def _forget(self) -> None:
        self.session_id: str | None = None
        self.is_promised = self.is_closing = False
        self.kept: list[Remembered] = []
        self.ended: list[Remembered] = []
        self.unknown: dict[str, Any] | None = None
        self.rewound_to: int | None = None
        self.metadata: dict[str, str] = {}
        self.next_metadata: dict[str, str] | None = None

    async def run(self) -> None:
        """Live until the last server has run for a while."""
        while not (self.town.is_over and self.unknown is None and self.rewound_to is None):
            url = await self.place()
            try:
                async with asyncio.timeout(self.patience_s):
                    await self._visit(url)
            except* LOST as errors:
                self.town.lost(errors)
                await asyncio.sleep(0.02)

    async def place(self) -> str:
        """Return the server to go to next."""
        return await self.town.place()

    def note_progress(self, frame: dict[str, Any]) -> None:
        """Be told of each frame of a turn that runs."""

    async def _visit(self, url: str) -> None:
        async with self.town.http(url) as http:
            if self.session_id is None:
                self._forget()
                if self.chance.happens(0.5):
                    answer = await http.post("/v1/sessions", json={})
                    if answer.status_code != 201:
                        return
                    self._hear_opened(answer.json())
            if not await self._is_as_remembered(http):
                return
            async with greeted(url, self.session_id or "new") as wire:
                self.session_id = wire.hello["session_id"]
                while not (self.town.is_over and self.unknown is None):
                    if not await self._talk_and_update(wire, http):
                        return
                    if self.chance.happens(0.15) and len(self.kept) > 1:
                        await self._rewind(http)
                        if self.rewound_to is not None:
                            return
                    if self._is_long:
                        await self._close(http)
                        return

    def _hear_opened(self, session: dict[str, Any]) -> None:
        self.session_id, self.is_promised = session["id"], session["durable"] is True
        self.report.saw["opened, and not on disk"] += not self.is_promised

    async def _talk_and_update(self, wire: Wire, http: httpx.AsyncClient) -> bool:
        """Run a turn; perhaps give the session other metadata at the same time."""
        async with asyncio.TaskGroup() as both:
            if self.next_metadata is None and self.chance.happens(0.2):
                both.create_task(self._update(http))
            return await self._talk(wire)

    async def _update(self, http: httpx.AsyncClient) -> None:
        """Give it other metadata; until they are told to be on disk, both may be true."""
        self.next_metadata = {"at": str(self.chance.below(1 << 30))}
        path = f"/v1/sessions/{self.session_id}"
        answer = await http.patch(path, json={"metadata": self.next_metadata})
        if answer.status_code == 200 and answer.json()["durable"]:
            self.metadata = self.next_metadata
            self.report.saw["updated"] += 1
            self.next_metadata = None

    async def _talk(self, wire: Wire) -> bool:
        """Run a turn, or the one whose end is not known; return whether to go on."""
        body = self._next_turn()
        await wire.send("turn.create", **body)
        while True:
            frame = await wire.until(*ENDS, "error", "turn.delta")
            if frame["type"] == "turn.delta":
                self.note_progress(frame)
                continue
            if frame["type"] == "error":
                self.report.saw[f"refused: {frame['error']['code']}"] += 1
                return False
            if frame["turn_id"] == body["turn_id"]:
                break
        self._hear(frame, body)
        return True

    def _next_turn(self) -> dict[str, Any]:
        """Return a new turn, or the one whose end is not known."""
        if self.unknown is None:
            self.num_asked += 1
            turn_id = f"c{self.number}-{self.num_asked}"
            self.unknown = echo_turn(self.chance, turn_id, max_tokens=self.chance.between(1, 24))
        else:
            self.report.saw["asked again"] += 1
        return self.unknown

    def _hear(self, end: dict[str, Any], body: dict[str, Any]) -> None:
        self.unknown = None
        self.report.saw[end["type"]] += 1
        if end.get("retryable"):
            self.report.saw["failed, and to run again"] += 1
            self.report.saw[f"failed: {(end.get('error') or {}).get('code')}"] += 1
            self.unknown = body
            return
        if not end.get("durable"):
            # It never ran: it was canceled while it waited, by a server that shuts down.
            if end["usage"]["input_tokens"]:
                self._complain(f"{body['turn_id']} ran and is not on disk: {end}")
            return
        self.report.saw[TOLD] += 1
        turn = Remembered(body["turn_id"], body, end)
        self.ended.append(turn)
        is_kept = end["type"] == "turn.completed" or end.get("kept_partial", False)
        if is_kept:
            expected = self._num_tokens() + len(body["input_ids"])
            if end["usage"]["input_tokens"] != expected:
                self._complain(
                    f"{turn.turn_id} saw {end['usage']['input_tokens']} tokens, not {expected}"
                )
            self.kept.append(turn)

    async def _rewind(self, http: httpx.AsyncClient) -> None:
        """Go back a few turns; until it is told to be on disk, both histories may be true."""
        self.rewound_to = self.chance.between(1, len(self.kept) - 1)
        item_id = self.kept[self.rewound_to - 1].end["item"]["id"]
        path = f"/v1/sessions/{self.session_id}/rewind"
        answer = await http.post(path, json={"to_item": item_id})
        if answer.status_code == 200 and not answer.json()["durable"]:
            return
        if answer.status_code == 409 and answer.json()["error"]["code"] == "session_moved":
            return  # before it was written, or behind that
        if answer.status_code == 200:
            del self.kept[self.rewound_to :]
            self.report.saw["rewound"] += 1
        self.rewound_to = None

    async def _close(self, http: httpx.AsyncClient) -> None:
        self.is_closing = True  # until the answer comes it may be there or not
        await http.delete(f"/v1/sessions/{self.session_id}")
        self.report.saw["closed"] += 1
        self._forget()

    async def _is_as_remembered(self, http: httpx.AsyncClient) -> bool:
        """Compare the session with what this client was told of it."""
        if self.session_id is None:
            return True
        answer = await http.get(f"/v1/sessions/{self.session_id}/items")
        if answer.status_code == 404:
            self.report.saw["closed unheard"] += self.is_closing
            if (self.is_promised or self.ended) and not self.is_closing:
                self._complain(f"{self.session_id} is gone, with {len(self.ended)} turns")
            self._forget()
            return False
        if answer.status_code != 200:
            return False
        self.is_closing = False
        items = answer.json()["data"]
        found = [item for item in items if item["role"] == "assistant"]
        wanted = [turn.end["item"] for turn in self.kept]
        if self.rewound_to is not None and len(found) == self.rewound_to:
            del self.kept[self.rewound_to :]
            wanted = wanted[: self.rewound_to]
            self.report.saw["rewound unheard"] += 1
        self.rewound_to = None
        if len(found) == len(wanted) + 1 and self.unknown is not None:
            # It came to the disk, and nobody could be told.
            if found[-1]["turn_id"] != self.unknown["turn_id"]:
                self._complain(f"{found[-1]['turn_id']} is there, and nobody waits for it")
            self.report.saw["there, and not told of"] += 1
            found.pop()
        told = [(item["id"], item["content"]) for item in wanted]
        if [(item["id"], item["content"]) for item in found] != told:
            self._complain(f"{self.session_id}: told {told}, found {found}")
        if self.ended:
            await self._is_ended_once(http, self.chance.pick(self.ended))
        await self._has_its_metadata(http)
        return True

    async def _has_its_metadata(self, http: httpx.AsyncClient) -> None:
        answer = await http.get(f"/v1/sessions/{self.session_id}")
        if answer.status_code != 200:
            return
        found = answer.json()["metadata"]
        if found == self.next_metadata:
            self.metadata = found
            self.report.saw["updated unheard"] += 1
        elif found != self.metadata:
            self._complain(f"{self.session_id}: told {self.metadata}, found {found}")
        self.next_metadata = None

    async def _is_ended_once(self, http: httpx.AsyncClient, turn: Remembered) -> None:
        """A turn asked for again gives the end that it had."""
        answer = await http.post(f"/v1/sessions/{self.session_id}/turns", json=turn.body)
        if answer.status_code != 200:
            return
        again, usage = answer.json(), turn.end["usage"]
        told = (turn.end["type"], usage["input_tokens"], usage["output_tokens"])
        found = (
            f"turn.{again['status']}",
            again["usage"]["input_tokens"],
            again["usage"]["output_tokens"],
        )
        if found != told or again["durable"] is not True:
            self._complain(f"{turn.turn_id}: told {told}, found {found}")
        self.report.saw["asked for twice"] += 1

    @property
    def _is_long(self) -> bool:
        """Whether it is time for another session."""
        return len(self.ended) > MAX_TURNS or self._num_tokens() > MAX_TOKENS

    def _num_tokens(self) -> int:
        if not self.kept:
            return 0
        usage = self.kept[-1].end["usage"]
        return int(usage["input_tokens"] + usage["output_tokens"])

    def _complain(self, problem: str) -> None:
        number = len(self.report.ready_s)
        self.report.problems.append(f"server {number}, client {self.number}: {problem}")
        print(self.report.problems[-1][:600], flush=True)


async def crashes(town: Town, *, cycles: int, clients: int = 16) -> Report:
    """Let clients live through so many servers."""
    lives = [asyncio.create_task(Client(town, number).run()) for number in range(clients)]
    try:
        last = await town.cycles(cycles)
        await asyncio.gather(*lives)
        town.report.saw[f"exit {await asyncio.to_thread(last.stop)}"] += 1
    finally:
        for life in lives:
            life.cancel()
    return town.report


async def say_how_far(town: Town, cycles: int) -> None:
    """Print a line whenever one part in twenty is done."""
    step = max(1, cycles // 20)
    for number in range(step, cycles + 1, step):
        while len(town.report.ready_s) <= number:
            await asyncio.sleep(1)
        found = f"{town.report.saw[TOLD]} told, {len(town.report.problems)} problems"
        print(f"{number} of {cycles} servers, {found}", flush=True)


async def watched(town: Town, cycles: int, clients: int) -> Report:
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(say_how_far(town, cycles))
        report = await crashes(town, cycles=cycles, clients=clients)
        watch.cancel()
    return report


def main() -> int:
    """Run it, print what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        town = Town(Path(directory), Report(), Decisions(args.seed))
        found = asyncio.run(watched(town, args.cycles, args.clients))
    pprint(dict(found.saw), sort_dicts=False)
    print(f"ready after {max(found.ready_s):.2f} s at most; problems: {len(found.problems)}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
