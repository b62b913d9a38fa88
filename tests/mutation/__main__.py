"""`python -m tests.mutation [--mutants N] [--seed S]`: run tests on mutants of the serving code.

A sample is kept under `build/mutation/`, named after its seed and the serving code: a run that
was interrupted goes on where it was, and a larger sample begins with a smaller one. Mutants are
put into copies of the working tree. Exit with 1 if fewer mutants were killed than must be.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import inspect
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkItem

from tests.mutation.draw import draw
from tests.mutation.judge import Judge
from tests.mutation.report import report, verdict
from tests.mutation.stages import serving_files

ROOT = Path(__file__).resolve().parents[2]


def sample_directory(parent: Path, seed: int) -> Path:
    """Return where the sample of this seed and the present serving code is kept."""
    digest = hashlib.sha256(Path(inspect.getsourcefile(draw) or "").read_bytes())
    for paths in serving_files(ROOT).values():
        for path in paths:
            digest.update(path.as_posix().encode() + (ROOT / path).read_bytes())
    return parent / f"seed{seed}-{digest.hexdigest()[:10]}"


def fill(database: WorkDB, num_mutants: int, seed: int) -> list[WorkItem]:
    """Return the sample's first mutants, after drawing those that the database lacks."""
    present = database.num_work_items
    if present < num_mutants:
        drawn = enumerate(islice(draw(ROOT, seed), num_mutants), 1)
        items = [WorkItem.single(f"{number:05}", spec) for number, spec in drawn]
        database.add_work_items(items[present:])
    return sorted(database.work_items, key=lambda item: item.job_id)[:num_mutants]


def run(judge: Judge, database: WorkDB, items: list[WorkItem], num_workers: int) -> None:
    """Judge these mutants, write each result down at once, and say how far it is."""
    started_s = time.monotonic()
    with ThreadPoolExecutor(num_workers) as pool:
        judged = {pool.submit(judge.judge, item): item for item in items}
        try:
            for number, done in enumerate(as_completed(judged), 1):
                item, result = judged[done], done.result()
                database.set_result(item.job_id, result)
                spec = item.mutations[0]
                print(
                    f"{number:>4}/{len(items)} {time.monotonic() - started_s:>6.0f} s  "
                    f"{spec.module_path}:{spec.start_pos[0]} {spec.operator_name}: "
                    f"{result.test_outcome.value}, {result.output}",
                    flush=True,
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            judge.stop()
            raise


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--patience", type=float, default=1200.0, help="seconds of passing tests per mutant"
    )
    parser.add_argument(
        "--again", action="store_true", help="try survivors without a verdict again"
    )
    parser.add_argument("--report", action="store_true", help="run no tests, only report")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "mutation")
    options = parser.parse_args()
    for interrupt in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore SIGINT
        signal.signal(interrupt, signal.default_int_handler)
    directory = sample_directory(options.directory.resolve(), options.seed)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock, use_db(directory / "sample.sqlite") as database:
        if not options.report:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.exit(
                    f"another run works on this sample, in {directory}; stop it or wait for it"
                )
            items = fill(database, options.mutants, options.seed)
            results = dict(database.results)
            pending = [
                item
                for item in items
                if (known := results.get(item.job_id)) is None
                or (options.again and verdict(item, known) == "open")
            ]
            print(f"{len(pending)} of {len(items)} mutants to run, kept in {directory}", flush=True)
            judge = Judge(ROOT, directory, num_workers=options.workers, patience_s=options.patience)
            run(judge, database, pending, options.workers)
            for file in sorted(judge.unusable):
                print(f"not used, because it fails without a mutant too: {file}")
        completed = [
            (item, result)
            for item, result in database.completed_work_items
            if int(item.job_id) <= options.mutants
        ]
        lines, is_enough = report(sorted(completed, key=lambda pair: pair[0].job_id))
        print("\n".join(lines))
        return 0 if is_enough else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
