"""Replicas that share a store, and what befalls them: killed, paused, told to end, begun anew.

Each replica is one server process after another; each of those has a URL of its own, so that it is
known later what became of the one at a URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import httpx

from session_server.local_server import LocalServer
from tests.chaos.crashes import FLAGS, Place, Report
from tests.rig.decisions import Decisions
from tests.rig.echo_replica import echo_replica
from tests.rig.processes import ECHO_ENGINE, engines_of
from tests.web.wire_client import http_client

NUM_REPLICAS = 3
PAUSED_LEASES = 3
"""How long a replica is stopped whose sessions others have taken when it goes on."""

LEASE_IS_OVER = "the lease of this replica is over"
BUSY = (409, 429, 503)
"""Statuses of what may be asked again."""

_REFUSED = 'session_server_store_writes_total{outcome="failed"}'
_BUGS = ("Traceback", "AssertionError", " CRITICAL ")

Deed = Callable[["Replica"], Awaitable[None]]


class Fate(NamedTuple):
    """What befell a server, and when, in monotonic seconds."""

    kind: str
    at_s: float


@dataclass
class Replica:
    """One of the servers there are. `url` is None while there is none. `store_url` and `door` are
    how it reaches the database, and how clients reach a server of it."""

    number: int
    store_url: str
    door: Callable[[str], str] = lambda url: url
    server: LocalServer | None = None
    begun: asyncio.Task[LocalServer] | None = None
    url: str | None = None


class Way(Place, Protocol):
    """The clients' way to replicas. `lease_s`: how long the sessions of one that is lost are
    nobody's. `think_s`: how long a client says nothing between two turns, at most."""

    lease_s: float
    think_s: float = 0.0

    @property
    def urls(self) -> list[str]:
        """Where servers are now."""
        ...

    def fate_of(self, url: str, since_s: float) -> str:
        """Return what befell the server at a URL since a time: "a handover" if nothing did."""
        ...

    def may_still_run(self) -> bool:
        """Return whether what was asked of a server that is lost may run there still."""
        return True


@dataclass
class Cluster(Way):
    """Replicas, and the clients' way to them.

    `num_left`: how many more servers and engines are to be killed. `fates`: what befell the server
    at a URL last. `pace_s`: how long a server lives about. `good_ends`: how
    a server may exit that is told to. `lines`: what servers wrote last.
    """

    report: Report
    chance: Decisions
    lease_s: float
    replicas: list[Replica]
    num_left: int = 0
    pace_s: float = 4.0
    is_over: bool = False
    good_ends: tuple[int, ...] = (0,)
    fates: dict[str, Fate] = field(default_factory=dict)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))

    async def place(self) -> str:
        """Wait for a server, and return the URL of one."""
        while not (urls := self.urls):
            await asyncio.sleep(0.01)
        return self.chance.pick(urls)

    @property
    def urls(self) -> list[str]:
        """Where servers are now."""
        return [replica.url for replica in self.replicas if replica.url is not None]

    def fate_of(self, url: str, since_s: float) -> str:
        """Return what befell the server at a URL since a time: "a handover" if nothing did."""
        fate = self.fates.get(url)
        return "a handover" if fate is None or fate.at_s < since_s else fate.kind

    async def start(self, replica: Replica) -> None:
        """Begin a server, and wait until it listens."""
        begun_s = time.monotonic()
        server = echo_replica(
            replica.store_url,
            [*FLAGS, "--drain-timeout", "2"],
            lease_s=self.lease_s,
            on_line=self._on_line,
        )
        replica.begun = asyncio.create_task(asyncio.to_thread(server.__enter__))
        replica.server = await asyncio.shield(replica.begun)
        self.report.ready_s.append(time.monotonic() - begun_s)
        replica.url = replica.door(server.url)

    def _on_line(self, line: str) -> None:
        self.lines.append(line)
        if LEASE_IS_OVER in line:
            self.report.saw["leases lost"] += 1
        if any(word in line for word in _BUGS):
            self.report.problems.append(f"a server wrote {line}")

    async def torment(self, replica: Replica, deeds: Sequence[Deed]) -> None:
        """Have things befall one replica until enough were killed, then leave one that lives."""
        deed = deeds[replica.number]
        while self.num_left > 0:
            if replica.url is None:
                await self.start(replica)
            await asyncio.sleep(self.pace_s * (0.25 + 1.5 * self.chance.share()))
            await deed(replica)
            deed = self.chance.pick(deeds)
        if replica.url is None:
            await self.start(replica)

    # -- deeds

    async def kill(self, replica: Replica) -> None:
        """End a server with kill -9."""
        self.num_left -= 1
        await self._end(replica, signal.SIGKILL)

    async def terminate(self, replica: Replica) -> None:
        """End a server in order: its sessions are handed over at once."""
        status = await self._end(replica, signal.SIGTERM)
        if status not in self.good_ends:
            said = replica.server.last_lines if replica.server is not None else ""
            self.report.problems.append(f"exit {status} of a server that was told to end: {said}")

    async def _end(self, replica: Replica, number: signal.Signals) -> int:
        url, server = replica.url, replica.server
        assert url is not None
        assert server is not None
        replica.url = None
        self.befell(url, number.name)
        os.kill(server.pid, number)
        return await asyncio.to_thread(server.wait, timeout_s=60)

    async def kill_engine(self, replica: Replica) -> None:
        """End the engine of a server with kill -9; the server begins another one."""
        assert replica.server is not None
        for pid in engines_of(replica.server.pid, ECHO_ENGINE):
            os.kill(pid, signal.SIGKILL)
            self.num_left -= 1
            self.report.saw["engine killed"] += 1

    async def pause(self, replica: Replica) -> None:
        """Stop a server until its sessions are others', and let it go on."""
        assert replica.url is not None
        assert replica.server is not None
        pid, before = replica.server.pid, await self._num_refused(replica)
        self.befell(replica.url, "SIGSTOP")
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(PAUSED_LEASES * self.lease_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        self.befell(replica.url, "SIGCONT")
        await asyncio.sleep(1.0)
        self.report.saw["refused commits"] += int(await self._num_refused(replica) - before)

    def befell(self, url: str, kind: str) -> None:
        """Note what has become of the server at a URL."""
        self.fates[url] = Fate(kind, time.monotonic())
        self.report.saw[f"server {kind}"] += 1

    async def _num_refused(self, replica: Replica) -> float:
        """Return how many writes of a server have failed so far."""
        assert replica.server is not None
        async with http_client(replica.server.url, timeout_s=5) as http:
            with contextlib.suppress(httpx.TransportError):
                lines = (await http.get("/metrics")).text.splitlines()
                return sum(float(line.split()[-1]) for line in lines if line.startswith(_REFUSED))
        return 0.0

    # -- the end

    async def stop(self) -> None:
        """End all servers in order."""
        await asyncio.gather(*(self.terminate(each) for each in self.replicas if each.url))

    async def leave_nothing(self) -> None:
        """End whatever still runs, at once."""
        begun = [replica.begun for replica in self.replicas if replica.begun is not None]
        for server in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(server, LocalServer) and server.returncode is None:
                os.kill(server.pid, signal.SIGCONT)
                os.kill(server.pid, signal.SIGKILL)
                server.wait()
