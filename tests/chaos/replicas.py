"""Kill, pause and end replicas that share a store, under clients that remember what they were told.

`python -m tests.chaos.replicas --kills 200`: three servers over one PostgreSQL. What was told to be
on disk is there for ever, once, as it was told and in order, whichever replica is asked; no replica
answers for a session that another one has; and the tables agree.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pprint import pprint
from typing import TypeVar

from tests.chaos.cluster import NUM_REPLICAS, Cluster, Deed, Replica, Way
from tests.chaos.crashes import LOST, TOLD, Report
from tests.chaos.ledger import Ledger
from tests.chaos.movers import Chatter, Mover, Onlooker, Requester, Waits
from tests.rig.decisions import Decisions
from tests.rig.postgres import running

_T = TypeVar("_T")

SETTLED_S = 60.0
"""How long the last servers may take to show all sessions as remembered."""

CERTAIN = (
    "turn.completed",
    "turns over REST",
    "chat completions",
    "looked at",
    "asked again",
    "connection lost",
    "server SIGKILL",
    "server SIGTERM",
    "server SIGSTOP",
    "leases lost",
    "adoptions",
)
"""What must have happened, or a run says nothing."""

WANTED = (
    *CERTAIN,
    "asked for twice",
    "rewound",
    "engine killed",
    "refused: session_moved",
    "failed: session_moved",
    "refused commits",
)
"""And what must have in a run of `MANY` kills."""

MANY = 20


class Crowd:
    """The clients of one run."""

    def __init__(
        self,
        cluster: Way,
        num_clients: int,
        *,
        kinds: Sequence[type[Mover]] = (Mover, Mover, Requester),
    ) -> None:
        self.cluster, self.waits = cluster, Waits()
        self.movers = [
            kinds[number % len(kinds)](cluster, number, self.waits) for number in range(num_clients)
        ]
        self.chatters = [Chatter(cluster, number) for number in range(max(1, num_clients // 4))]
        self.onlooker = Onlooker(cluster, self.movers)

    def start(self) -> list[asyncio.Task[None]]:
        """Have all of them live."""
        clients = [asyncio.create_task(each.run()) for each in self.clients]
        return [*clients, asyncio.create_task(self.onlooker.run())]

    @property
    def clients(self) -> Sequence[Mover | Chatter]:
        """Those that talk."""
        return (*self.movers, *self.chatters)

    async def come_to_rest(self, lives: Sequence[asyncio.Task[None]]) -> None:
        """Wait until everybody has ended what they were about; complain of whoever cannot."""
        _, waiting = await asyncio.wait(lives, timeout=SETTLED_S)
        for client, life in zip((*self.clients, self.onlooker), lives, strict=True):
            if life in waiting:
                self.cluster.report.problems.append(f"{vars(client)} cannot come to rest")
            elif (error := life.exception()) is not None:
                raise error

    async def settle(self) -> None:
        """Hold what each remembers against each of the replicas, one after the other."""
        for client in self.clients:
            for url in self.cluster.urls:
                await self._settle(client, url)

    async def _settle(self, client: Mover | Chatter, url: str) -> None:
        until_s = time.monotonic() + SETTLED_S
        while time.monotonic() < until_s:
            try:
                if await client.is_settled(url):
                    return
            except LOST:
                self.cluster.report.saw["cut off at the end"] += 1
            await asyncio.sleep(0.05)
        self.cluster.report.problems.append(f"{url} does not show {client.session_id}")


async def torment(
    cluster: Cluster,
    deeds: Sequence[Deed],
    *,
    num_clients: int,
    most_s: float = math.inf,
    before: Callable[[], Awaitable[None]] | None = None,
) -> Waits:
    """Let clients live in a cluster until enough was killed, or for `most_s`; then judge. `before`:
    what is done once all replicas have begun."""
    crowd = Crowd(cluster, num_clients)
    lives: list[asyncio.Task[None]] = []
    try:
        await asyncio.gather(*map(cluster.start, cluster.replicas))
        if before is not None:
            await before()
        lives = crowd.start()
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_say_how_far(cluster))
            torments = [tasks.create_task(cluster.torment(at, deeds)) for at in cluster.replicas]
            await asyncio.wait(torments, timeout=None if math.isinf(most_s) else most_s)
            cluster.num_left = min(cluster.num_left, 0)
            await asyncio.wait(torments)
            watch.cancel()
        cluster.is_over = True
        await crowd.come_to_rest(lives)
        await crowd.settle()
        await cluster.stop()
    finally:
        for life in lives:
            life.cancel()
        await cluster.leave_nothing()
    cluster.report.problems += crowd.onlooker.problems()
    return crowd.waits


async def _say_how_far(cluster: Cluster) -> None:
    while True:
        await asyncio.sleep(30)
        found = f"{cluster.report.saw[TOLD]} told, {len(cluster.report.problems)} problems"
        print(f"{cluster.num_left} to be killed, {found}", flush=True)


def judge(report: Report, url: str, wanted: Sequence[str]) -> None:
    """Read the tables; add to a report what cannot be there, and what never happened."""
    ledger = Ledger.read(url)
    report.saw["sessions"] = len(ledger.sessions)
    report.saw["adoptions"] = ledger.num_adoptions
    report.problems += ledger.problems()
    report.problems += (f"never happened: {name}" for name in wanted if not report.saw[name])


async def ended_by_signals(work: Coroutine[None, None, _T]) -> _T:
    """Do work that SIGINT and SIGTERM cancel, so that nothing it has begun is left behind."""
    task, loop = asyncio.create_task(work), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def deeds_of(cluster: Cluster) -> list[Deed]:
    """Return what may befall a replica, each as often as it is there: one of the first befalls each
    before anything else."""
    first: list[Deed] = [cluster.pause, cluster.terminate, cluster.kill]
    return [*first, cluster.terminate, *[cluster.kill_engine] * 4, *[cluster.kill] * 4]


def run(
    seed: int,
    *,
    kills: int,
    lease_s: float,
    pace_s: float,
    num_clients: int,
    most_s: float = math.inf,
) -> tuple[Report, list[str]]:
    """Run it; return what happened, and how long sessions took to go on elsewhere."""
    report = Report()
    with running() as postgres:
        url = postgres.new_database()
        replicas = [Replica(number, url) for number in range(NUM_REPLICAS)]
        cluster = Cluster(report, Decisions(seed), lease_s, replicas, num_left=kills, pace_s=pace_s)
        deeds = deeds_of(cluster)
        work = torment(cluster, deeds, num_clients=num_clients, most_s=most_s)
        waits = asyncio.run(ended_by_signals(work))
        judge(report, url, WANTED if kills >= MANY else CERTAIN)
    return report, [*waits.lines()]


def told(report: Report, waits: Sequence[str]) -> Iterator[str]:
    """Say what was found."""
    yield from waits
    yield f"ready after {max(report.ready_s):.2f} s at most; problems: {len(report.problems)}"
    for problem in report.problems[:40]:
        yield problem if len(problem) < 1000 else f"{problem[:300]} ... {problem[-600:]}"


def main() -> int:
    """Run it, print what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=math.inf, help="kill for no longer")
    parser.add_argument("--lease-s", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--pace-s", type=float, default=4.0, help="how long a server lives about")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report, waits = run(
        args.seed,
        kills=args.kills,
        most_s=60 * args.minutes,
        lease_s=args.lease_s,
        pace_s=args.pace_s,
        num_clients=args.clients,
    )
    pprint(dict(report.saw), sort_dicts=False)
    print("\n".join(told(report, waits)))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
