"""Kill replicas under Ray Serve, their engines and Ray's own workers, under clients that remember.

`python -m tests.chaos.ray_cluster --kills 200`: three replicas over one PostgreSQL, and 64
conversations over WebSocket, REST and OpenAI's library, all through Ray's proxy. What was told to
be on disk is there for ever, once, as it was told and in order; every answer is what an echo says.
`--rolling 3`: nothing is killed; replicas are replaced, and scaled from 3 to 1 and back, so often.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from pprint import pprint

from tests.chaos.crashes import FLAGS, TOLD, Report
from tests.chaos.guests import (
    Guest,
    GuestOverRest,
    LibraryResponder,
    responded_again,
    told_again,
)
from tests.chaos.movers import Waits
from tests.chaos.ray_town import CONTROLLER, ENGINE, LEASE_S, PROXY, REPLICA, RayTown
from tests.chaos.replicas import Crowd, ended_by_signals, judge, told
from tests.deploy.cluster import running_cluster
from tests.rig.decisions import Decisions
from tests.rig.echo_cluster import PROGRAM
from tests.rig.echo_replica import echo_replica
from tests.rig.postgres import running
from tests.rig.processes import assert_gone

CERTAIN = (
    "turn.completed",
    "turns over REST",
    "chat completions",
    "responses",
    "looked at",
    "connection lost",
    "adoptions",
    "answers that are an echo's",
    "answers that are the same elsewhere",
)
"""What must have happened, or a run says nothing."""

KILLED = (*CERTAIN, REPLICA, ENGINE, PROXY, CONTROLLER, "asked again", "conversed")
"""And what must have in a run of `MANY` kills."""

MANY = 20

Torment = Callable[[RayTown], Awaitable[None]]


class RayCrowd(Crowd):
    """The clients of one run."""

    def __init__(self, town: RayTown, num_clients: int) -> None:
        num_movers = num_clients * 5 // 8
        super().__init__(town, num_movers, kinds=(Guest, Guest, GuestOverRest))
        rest = num_clients - num_movers - len(self.chatters)
        self.responders = [LibraryResponder(town, number) for number in range(rest)]

    @property
    def clients(self) -> Sequence[Guest | LibraryResponder]:
        return (*super().clients, *self.responders)

    async def compare(self) -> None:
        """Hold what OpenAI's library was told against a server of its own."""
        with echo_replica("none", FLAGS, lease_s=LEASE_S) as server:
            await asyncio.gather(
                *(told_again(each, server.url) for each in self.chatters),
                *(responded_again(each, server.url) for each in self.responders),
            )


async def live(town: RayTown, torment: Torment, *, num_clients: int) -> Waits:
    """Let clients live in a cluster until its torment is over; then judge."""
    crowd = RayCrowd(town, num_clients)
    await town.up("--replicas", "3")
    lives: list[asyncio.Task[None]] = []
    with town.watched():
        try:
            lives = crowd.start()
            watch = asyncio.create_task(say_how_far(town))
            await torment(town)
            watch.cancel()
            town.is_over = True
            await crowd.come_to_rest(lives)
            await crowd.settle()
        finally:
            for life in lives:
                life.cancel()
    await crowd.compare()
    town.report.problems += crowd.onlooker.problems()
    return crowd.waits


async def kill(town: RayTown) -> None:
    """Kill as many as are to be killed."""
    await asyncio.sleep(5)
    torments = asyncio.gather(town.torment(), town.torment_engines())
    most_s = None if math.isinf(town.most_s) else town.most_s
    await asyncio.wait([torments], timeout=most_s)
    town.num_left = min(town.num_left, 0)
    await torments
    await asyncio.sleep(5)


async def roll(town: RayTown) -> None:
    """Replace all replicas, one after the other, then have one of them, and three again."""
    for number in range(town.num_left):
        for what, flags in (
            ("replaced", ("--replicas", "3", "--log-level", ("info", "warning")[number % 2])),
            ("3 to 1", ("--replicas", "1", "--log-level", ("info", "warning")[number % 2])),
            ("1 to 3", ("--replicas", "3", "--log-level", ("info", "warning")[number % 2])),
        ):
            begun_s, before = time.monotonic(), town.report.saw[TOLD]
            await town.up(*flags)
            await town.rows(int(flags[1]))
            took_s, num = time.monotonic() - begun_s, town.report.saw[TOLD] - before
            town.report.saw[f"replicas {what}"] += 1
            print(f"{what} in {took_s:.1f} s, and {num} turns were told meanwhile", flush=True)
            await asyncio.sleep(5)
        town.num_left -= 1


async def say_how_far(town: RayTown) -> None:
    """Print a line now and then."""
    while True:
        await asyncio.sleep(30)
        found = f"{town.report.saw[TOLD]} told, {len(town.report.problems)} problems"
        print(f"{time.strftime('%H:%M:%S')} {town.num_left} to go, {found}", flush=True)


def run(
    seed: int, *, num: int, torment: Torment, num_clients: int, think_s: float, most_s: float
) -> tuple[Report, list[str]]:
    """Run it; return what happened, and how long sessions took to go on elsewhere."""
    report = Report()
    with (
        tempfile.TemporaryDirectory() as state,
        running() as postgres,
        running_cluster(Path(state), PROGRAM) as cluster,
    ):
        town = RayTown(report, Decisions(seed), cluster, postgres.new_database(), num)
        town.think_s, town.most_s = think_s, most_s
        work = live(town, torment, num_clients=num_clients)
        waits = asyncio.run(ended_by_signals(work))
        town.read_logs()
        cluster.run("down")
        assert_gone([*cluster.seen])
        wanted = KILLED if num >= MANY else CERTAIN
        judge(report, town.store_url, wanted if torment is kill else CERTAIN)
    lines = [*waits.lines()]
    for kind, took_s in town.back_s.items():
        took_s.sort()
        half, most = took_s[len(took_s) // 2], took_s[int(len(took_s) * 0.95)]
        lines.append(f"all were back after {kind}: p50 {half:.1f} s, p95 {most:.1f} s")
    return report, lines


def main() -> int:
    """Run it, print what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=math.inf, help="kill for no longer")
    parser.add_argument("--rolling", type=int, default=0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--think-s", type=float, default=4.0, help="at most, between two turns")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    begun_s = time.monotonic()
    report, waits = run(
        args.seed,
        num=args.rolling or args.kills,
        torment=roll if args.rolling else kill,
        num_clients=args.clients,
        think_s=args.think_s,
        most_s=60 * args.minutes,
    )
    pprint(dict(report.saw), sort_dicts=False)
    print("\n".join(told(report, waits)))
    print(f"{time.monotonic() - begun_s:.0f} s")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
