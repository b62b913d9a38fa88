"""`python -m tests.sim_replicas [--seeds A..B] [--steps N] [--jobs N]`: simulate replicas.

Seed by seed, until so many steps were made. Ends with 1 at the first seed that fails, or if
something worth checking has never happened; the same seed fails again, by itself.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final

from tests.sim_replicas.fleet import table
from tests.sim_replicas.simulation import MAX_STEPS, Failure, Report, run

DEFAULT_STEPS: Final = 200_000
_CHUNK: Final = 4
"""Seeds that a process takes at a time."""

REPORTED: Final = (10, 30, 100)

COVERED_FROM: Final = 1_000_000
"""From how many steps on everything of `INTERESTING` has to have happened."""

INTERESTING: Final = (
    "asked for one being read",
    "asked for one in memory",
    "asked for one on disk",
    "burying waits for a commit",
    "create: durable False",
    "create: session_exists",
    "delete: durable False",
    "delete: durable True",
    "delete: session_moved",
    "fault: late",
    "fork: durable True",
    "given up at rest",
    "given up with a turn",
    "lease lost",
    "list: server_busy",
    "list: session_moved",
    "migration",
    "partition",
    "read: session_moved",
    "read: session_not_found",
    "released",
    "replica buried",
    "rewind: durable True",
    "rewind: session_moved",
    "taken from itself",
    "taken from nobody",
    "taken from one that is over",
    "turn: completed, durable False",
    "turn: cut draining, durable True",
    "turn: engine_restarting",
    "turn: session_moved",
    "turn: told again",
    "write refused",
    "write refused under a live lease",
)
"""What has to happen for a run to say something."""


@dataclass(slots=True)
class Totals:
    """Sums over simulations."""

    seeds: int = 0
    steps: int = 0
    coverage: Counter[str] = field(default_factory=Counter)

    def add(self, report: Report) -> None:
        """Count one simulation."""
        self.seeds += 1
        self.steps += report.steps
        self.coverage += report.coverage

    @property
    def missed(self) -> list[str]:
        """Return what has never happened, and should have."""
        return [name for name in INTERESTING if not self.coverage[name]]


def play_seeds(
    seeds: Iterable[int], max_steps: int = MAX_STEPS, num_replicas: int | None = None
) -> list[Report | str]:
    """Simulate seeds; the first failure is the last, and a text."""
    logging.getLogger("session_server").addHandler(logging.NullHandler())
    outcomes: list[Report | str] = []
    for seed in seeds:
        try:
            outcomes.append(run(seed, max_steps=max_steps, num_replicas=num_replicas))
        except Failure as failure:
            outcomes.append(str(failure))
            break
    return outcomes


def play(
    seeds: Iterable[int], *, num_jobs: int, max_steps: int, num_replicas: int | None = None
) -> Iterator[Report | str]:
    """Simulate seeds over processes; outcomes come in the order of the seeds."""
    if num_jobs == 1:
        for seed in seeds:
            yield from play_seeds([seed], max_steps, num_replicas)
        return
    source, pending = iter(seeds), deque[Future[list[Report | str]]]()
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            while True:
                while len(pending) < 3 * num_jobs and (chunk := list(islice(source, _CHUNK))):
                    pending.append(pool.submit(play_seeds, chunk, max_steps, num_replicas))
                if not pending:
                    return
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _range_of(text: str) -> Iterable[int]:
    first, dots, last = text.partition("..")
    if not dots:
        return [int(first)]
    return range(int(first), int(last) + 1) if last else count(int(first))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim_replicas")
    parser.add_argument("--seeds", default="0..", help="one, or the first and the last: 0..99")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="of all seeds together")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed-steps", type=int, default=MAX_STEPS, help="of one, with faults")
    parser.add_argument("--replicas", type=int, help="so many, and not what a seed draws")
    parser.add_argument("--report", action="store_true", help=f"measure {REPORTED} replicas")
    options = parser.parse_args(arguments)
    if options.report:
        for line in table(REPORTED):
            print(line, flush=True)
        return 0
    totals, begun_s = Totals(), time.perf_counter()
    seeds = _range_of(options.seeds)
    failed: str | None = None
    size = {"max_steps": options.seed_steps, "num_replicas": options.replicas}
    for outcome in play(seeds, num_jobs=options.jobs, **size):
        if isinstance(outcome, str):
            failed = outcome
            break
        totals.add(outcome)
        if totals.steps >= options.steps:
            break
    for name, num in sorted(totals.coverage.items()):
        print(f"{num:>9,} {name}")
    took_s = time.perf_counter() - begun_s
    speed = totals.steps / took_s
    print(f"{totals.seeds} seeds, {totals.steps:,} steps, {speed:,.0f} a second")
    if failed is None and totals.steps >= COVERED_FROM and totals.missed:
        failed = f"never happened: {', '.join(totals.missed)}"
    print(failed or "everything held")
    return 1 if failed else 0
