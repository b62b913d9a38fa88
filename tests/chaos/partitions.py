"""Part replicas from their database and from their clients, under clients that remember.

`python -m tests.chaos.partitions --cuts 60`: each replica of `replicas` reaches PostgreSQL, and its
clients reach it, over a line that is cut, slowed, held or dies. A replica that has no lease answers
for no session of the store; whatever needs no store goes on; and it comes back by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass
from functools import partial
from pprint import pprint

import httpx
import psycopg

from tests.chaos.cluster import NUM_REPLICAS, Cluster, Deed, Replica
from tests.chaos.crashes import Report
from tests.chaos.movers import MODEL, Waits
from tests.chaos.replicas import ended_by_signals, judge, told, torment
from tests.rig.cable import Cable, State, Streams, dial_postgres
from tests.rig.decisions import Decisions
from tests.rig.postgres import running
from tests.web.wire_client import http_client

LONG_LEASES = 2.5
"""How long a replica is parted from its database that is to lose its lease."""

PROMPT_S = 2.0
"""How soon a server answers what needs no database, on a machine that is at work."""

BACK_S = 30.0
"""How long a replica may take to answer for sessions again once its line works."""

FAULTS = (State.CUT, State.DEAD, State.HELD, State.SLOW)

CERTAIN = (
    "turn.completed",
    "chat completions",
    "looked at",
    "leases lost",
    "adoptions",
    "connection lost",
    "refused without a lease",
    "answered without a store",
)
"""What must have happened, or a run says nothing."""

WANTED = (
    *CERTAIN,
    "asked again",
    "told that it is not on disk",
    *(f"database {fault.value}" for fault in FAULTS),
    *(f"clients {fault.value}" for fault in FAULTS),
)
"""And what must have in a run of `MANY` cuts."""

MANY = 24


@dataclass
class Lines:
    """Both lines of a replica, and what its session is called that a probe asks for."""

    database: Cable
    clients: Cable
    probe: str
    server_url: str = ""

    def door(self, url: str) -> str:
        """Return where clients find a server that listens at a URL."""
        self.server_url = url
        return f"http://127.0.0.1:{self.clients.port}"

    async def dial_server(self) -> Streams:
        """Connect to the replica's present server."""
        host, _, port = self.server_url.removeprefix("http://").rpartition(":")
        return await asyncio.open_connection(host, int(port))


class Partitions:
    """Pull lines of replicas, and hold each replica to what it owes meanwhile."""

    def __init__(self, cluster: Cluster, lines: list[Lines]) -> None:
        self.cluster, self.report, self.chance = cluster, cluster.report, cluster.chance
        self.lines = lines
        self.back_s: list[float] = []
        self.slowest_s = 0.0

    @property
    def deeds(self) -> list[Deed]:
        """Return what may befall a replica."""
        parts = [self.part_for_long, self.part, self.part_clients] * 2
        return [*parts, self.cluster.kill, self.cluster.terminate]

    async def part(self, replica: Replica) -> None:
        """Pull the line to the database for less than a lease."""
        await self._pull(replica, "database", 0.7 * self.cluster.lease_s * self.chance.share())

    async def part_clients(self, replica: Replica) -> None:
        """Pull the line to the clients."""
        await self._pull(replica, "clients", 2 * self.cluster.lease_s * self.chance.share())

    async def part_for_long(self, replica: Replica) -> None:
        """Pull the line to the database until the replica has lost its lease, and wait until it is
        back."""
        watched = asyncio.create_task(self._watch(replica))
        try:
            await self._pull(replica, "database", LONG_LEASES * self.cluster.lease_s)
        finally:
            watched.cancel()
            await asyncio.gather(watched, return_exceptions=True)
        await self._comes_back(replica)

    async def _pull(self, replica: Replica, which: str, length_s: float) -> None:
        self.cluster.num_left -= 1
        lines, fault = self.lines[replica.number], self._next_fault(which)
        cable = lines.database if which == "database" else lines.clients
        assert replica.url is not None
        self.cluster.befell(replica.url, f"{which} {fault.value}")
        await cable.pull(fault)
        try:
            await asyncio.sleep(length_s)
        finally:
            await cable.pull(State.WORKS)

    def _next_fault(self, which: str) -> State:
        """Return the one that this kind of line has had least often."""
        num = self.report.saw
        return min(FAULTS, key=lambda fault: num[f"server {which} {fault.value}"])

    async def _watch(self, replica: Replica) -> None:
        """Ask a server that is parted from its database for this and that."""
        lines, since_s = self.lines[replica.number], time.monotonic()
        async with http_client(lines.server_url, timeout_s=20) as http:
            while True:
                asked_s = time.monotonic()
                await http.get("/health")
                await self._answers_without_a_store(http)
                took_s = time.monotonic() - asked_s
                self.slowest_s = max(self.slowest_s, took_s)
                if took_s > PROMPT_S:
                    self._complain(replica, f"answered without its database after {took_s:.1f} s")
                is_slow = lines.database.state is State.SLOW  # it may keep its lease
                if not is_slow and asked_s > since_s + self.cluster.lease_s:
                    await self._answers_for_nothing(replica, http, lines.probe)
                await asyncio.sleep(0.1)

    async def _answers_without_a_store(self, http: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 2, "model": MODEL}
        answer = await http.post("/v1/chat/completions", json=body)
        if answer.status_code == 200:
            self.report.saw["answered without a store"] += 1
        else:
            self.report.saw[f"without a store: {answer.json()['error']['code']}"] += 1

    async def _answers_for_nothing(
        self, replica: Replica, http: httpx.AsyncClient, name: str
    ) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            answer = await http.get(f"/v1/sessions/{name}", timeout=PROMPT_S)
            if answer.status_code == 200:
                self._complain(replica, "answered for a session without a lease")
            self.report.saw["refused without a lease"] += 1

    async def _comes_back(self, replica: Replica) -> None:
        """Wait until a replica answers for its session again."""
        lines, since_s = self.lines[replica.number], time.monotonic()
        async with http_client(lines.server_url, timeout_s=10) as http:
            while time.monotonic() < since_s + BACK_S:
                with contextlib.suppress(httpx.TimeoutException):
                    answer = await http.get(f"/v1/sessions/{lines.probe}")
                    if answer.status_code == 200:
                        self.back_s.append(time.monotonic() - since_s)
                        return
                await asyncio.sleep(0.05)
        self._complain(replica, f"is not back after {BACK_S:.0f} s")

    def _complain(self, replica: Replica, problem: str) -> None:
        did = dict(self.lines[replica.number].database.did)
        self.report.problems.append(f"replica {replica.number}, line {did}: {problem}")
        print(self.report.problems[-1], flush=True)


async def partitioned(cluster: Cluster, url: str, *, num_clients: int) -> tuple[Waits, Partitions]:
    """Let clients live in a cluster whose lines are pulled."""
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    async with contextlib.AsyncExitStack() as stack:
        lines: list[Lines] = []
        for replica in cluster.replicas:
            database = await stack.enter_async_context(Cable(dial_postgres(url)))
            both = Lines(database, database, f"probe-{replica.number}")
            both.clients = await stack.enter_async_context(Cable(both.dial_server))
            replica.store_url = f"postgresql://postgres@127.0.0.1:{database.port}/{name}"
            replica.door = both.door
            lines.append(both)
        partitions = Partitions(cluster, lines)
        opened = partial(open_probes, cluster, lines)
        deeds = partitions.deeds
        waits = await torment(cluster, deeds, num_clients=num_clients, before=opened)
        return waits, partitions


async def open_probes(cluster: Cluster, lines: list[Lines]) -> None:
    """Open the session of each replica that only probes ask for."""
    for each in lines:
        async with http_client(each.server_url) as http:
            answer = await http.post("/v1/sessions", json={"id": each.probe})
            assert answer.status_code == 201, answer.text


def run(
    seed: int, *, cuts: int, lease_s: float, pace_s: float = 2.0, num_clients: int = 9
) -> tuple[Report, list[str]]:
    """Run it; return what happened, and how long things took."""
    report = Report()
    with running() as postgres:
        url = postgres.new_database()
        replicas = [Replica(number, url) for number in range(NUM_REPLICAS)]
        cluster = Cluster(report, Decisions(seed), lease_s, replicas, num_left=cuts, pace_s=pace_s)
        cluster.good_ends = (0, 3)  # without its database a server says what it could not write
        work = partitioned(cluster, url, num_clients=num_clients)
        waits, partitions = asyncio.run(ended_by_signals(work))
        for kind in ("database", "clients"):
            for fault in FAULTS:
                report.saw[f"{kind} {fault.value}"] = report.saw[f"server {kind} {fault.value}"]
        judge(report, url, WANTED if cuts >= MANY else CERTAIN)
    back = f"back {max(partitions.back_s, default=0):.1f} s at most after its line was"
    slowest = f"without its database a server answered in {partitions.slowest_s:.2f} s at most"
    return report, [*waits.lines(), back, slowest]


def main() -> int:
    """Run it, print what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=60)
    parser.add_argument("--lease-s", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report, took = run(args.seed, cuts=args.cuts, lease_s=args.lease_s, num_clients=args.clients)
    pprint(dict(report.saw), sort_dicts=False)
    print("\n".join(told(report, took)))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
