"""Crash, kill and fail a store at every point of recorded runs, and count.

`python -m tests.disk --lives 3`: each life is recorded and crashed at all of its points; another
process is killed at each of its calls, and another one goes on; and each call fails in every way.
Of the runs behind kills and failures a share of the points is crashed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pprint import pprint
from typing import Final

from tests.disk.campaign import Report
from tests.disk.recording import Kind
from tests.disk.store_runs import FAULTS, WANTED, crashed, failed, recorded
from tests.rig.decisions import Decisions

SHARE: Final = 0.002
"""Of the points of a run behind a kill or a failure: there are thousands of runs."""


def _log_errors_alone() -> None:
    # Each of the thousands of images is warned of: others may read it.
    logging.getLogger("session_server").setLevel(logging.ERROR)


def crash(seed: int) -> Report:
    """Crash a life at all of its points."""
    report = crashed(recorded(seed=seed), Decisions(seed, "crash"))
    report.problems += [f"never happened: {label}" for label in WANTED - report.saw.keys()]
    return report


def kill(seed: int, sites: Iterable[int]) -> Report:
    """Kill a process at each of these calls, let another go on, and crash that."""
    report = Report()
    for site in sites:
        record = recorded(seed=seed, killed_at=site)
        report.add(crashed(record, Decisions(seed, "kill", site), share=SHARE, least=1))
    return report


def fail(seed: int, name: str, sites: Iterable[int]) -> Report:
    """Let each of these calls fail in one way."""
    return failed(name, sites, Decisions(seed, name), share=SHARE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=3, help="recorded runs")
    parser.add_argument("--step", type=int, default=1, help="every how many calls one fails")
    parser.add_argument("--seed", type=int, default=1, help="of the first life")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.lives)
    num_calls = sum(done.kind is not Kind.NOTE for done in recorded(seed=args.seed).done)
    sites = [range(at, num_calls, 16 * args.step) for at in range(0, 16 * args.step, args.step)]
    work: dict[str, Sequence[Callable[[], Report]]] = {
        "crashed at every point": [partial(crash, seed) for seed in seeds],
        "killed at every call": [partial(kill, args.seed, part) for part in sites],
    }
    for name in FAULTS:
        work[name] = [partial(fail, args.seed, name, part) for part in sites]
    problems = []
    with ProcessPoolExecutor(args.workers, initializer=_log_errors_alone) as pool:
        for name, parts in work.items():
            begun_s, report = time.monotonic(), Report()
            for found in [pool.submit(part) for part in parts]:
                report.add(found.result())
            problems += report.problems
            print(
                f"{name}: {report.num_points:,} points, {report.num_images:,} images, "
                f"{len(report.problems)} problems, {time.monotonic() - begun_s:.0f} s",
                flush=True,
            )
            pprint(dict(report.saw), compact=True, width=100)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
