"""Many simulations: seeds in order, over some processes, until enough steps were made."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Final

from tests.sim.failure import SimFailure
from tests.sim.simulation import Report, run

CHUNK_SEEDS: Final = 8
"""Seeds one process takes at a time."""

MAX_CHUNKS_AHEAD: Final = 3
"""Chunks per process that may be under way or waiting."""


@dataclass(slots=True)
class Totals:
    """Sums over simulations. `next_seed`: all before it are done. `violations`: seeds that failed,
    which count for nothing else.
    """

    next_seed: int = 0
    seeds: int = 0
    steps: int = 0
    wire_steps: int = 0
    turns: int = 0
    aborts: int = 0
    closes: int = 0
    faults: int = 0
    violations: int = 0
    coverage: Counter[str] = field(default_factory=Counter)

    @property
    def figures(self) -> dict[str, int]:
        """What the summary of a test run adds up."""
        counts = asdict(self)
        del counts["next_seed"], counts["coverage"]
        return counts

    def add(self, report: Report) -> None:
        """Count one simulation."""
        self.next_seed = report.seed + 1
        self.seeds += 1
        self.steps += report.steps
        self.wire_steps += report.steps if report.config.front == "wire" else 0
        self.turns += report.turns
        self.aborts += report.aborts
        self.closes += report.closes
        self.faults += report.faults
        self.coverage += report.coverage


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed gave: a report, or what failed and the lines of its trace."""

    seed: int
    report: Report | None
    message: str = ""
    trace_lines: tuple[str, ...] = ()


def play_seeds(seeds: Iterable[int], max_steps: int | None = None) -> list[Outcome]:
    """Simulate seeds one after another; the first failure is the last."""
    # What the server would log about injected faults is part of no report.
    logging.getLogger("session_server").addHandler(logging.NullHandler())
    outcomes = []
    for seed in seeds:
        try:
            outcomes.append(Outcome(seed, run(seed, max_steps=max_steps)))
        except SimFailure as failure:
            lines = tuple(failure.trace.lines())
            outcomes.append(Outcome(seed, None, str(failure), lines))
            break
    return outcomes


def play_steps(first_seed: int, num_steps: int) -> Totals:
    """Simulate seeds from the first on until so many steps were made.

    Raises:
        AssertionError: a seed failed; the text says how to see its story.
    """
    totals = Totals(next_seed=first_seed)
    while totals.steps < num_steps:
        for outcome in play_seeds([totals.next_seed]):
            assert outcome.report is not None, (
                f"{outcome.message}; python -m tests.sim --seed {outcome.seed} tells its story"
            )
            totals.add(outcome.report)
    return totals


def play(seeds: Iterable[int], *, num_jobs: int, max_steps: int | None = None) -> Iterator[Outcome]:
    """Simulate seeds over processes; outcomes come in the order of the seeds.

    Args:
        seeds: as many as there are, or without end; no more are begun than are asked for.
        num_jobs: processes; 1 stays in this one.
        max_steps: bound of each, see `run`.
    """
    if num_jobs == 1:
        for seed in seeds:
            yield from play_seeds([seed], max_steps)
        return
    source = iter(seeds)
    context = multiprocessing.get_context("spawn")
    pending: deque[Future[list[Outcome]]] = deque()
    with ProcessPoolExecutor(num_jobs, context, initializer=_end_with_parent) as pool:
        try:
            while True:
                while len(pending) < num_jobs * MAX_CHUNKS_AHEAD:
                    chunk = list(islice(source, CHUNK_SEEDS))
                    if not chunk:
                        break
                    pending.append(pool.submit(play_seeds, chunk, max_steps))
                if not pending:
                    return
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process of the pool"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
