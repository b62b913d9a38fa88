"""Simulate the server: real engine, cache, sessions and protocol; a fake device and virtual time.

  python -m tests.sim                          seeds 0, 1, 2 ... until 100,000 steps were checked
  python -m tests.sim --seed 7                 one seed
  python -m tests.sim --seeds 500..            from a seed on; 500..599 stops before 600
  python -m tests.sim --replay sim-7.jsonl     do again what a trace says
  python -m tests.sim --seeds 0.. --steps 20000000 --report soak.json

A seed decides everything: the sizes of the engine, what clients do, what fails and when. After
every step the accounts, the pages of touched sessions, everything a forward read and everything
that was said are checked. A failure prints the last steps, shrinks its operations, and leaves a
trace to replay; the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from session_server.arguments import whole_number
from tests.sim.campaign import Outcome, Totals, play
from tests.sim.failure import SimFailure
from tests.sim.shrink import MAX_TRIES, shrink
from tests.sim.simulation import replay
from tests.sim.simulation import run as run_seed
from tests.sim.story import LEGEND, Story, wrapped
from tests.sim.trace import Trace

DEFAULT_STEPS: Final = 100_000
NUM_LINES: Final = 40
"""Lines of the story shown of a failure."""

MAX_SEED: Final = 1 << 40
LINE_S: Final = 30.0
"""Between two lines of progress where there is no terminal to draw a bar on."""

_EXIT_FAILED: Final = 1
_SEED: Final = whole_number(0, MAX_SEED - 1)
_EXIT_UNUSABLE: Final = 2
_EXIT_STOPPED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate as the command line says.

    Returns:
        0 when everything held, 1 when something did not, 2 for a bad trace, 130 when stopped.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_arguments(parser)
    args = parser.parse_args(argv)
    logging.getLogger("session_server").addHandler(logging.NullHandler())
    console = Console(stderr=args.json)
    try:
        if args.replay is not None:
            return _replay(args, console)
        if args.seed is not None:
            return _one(args, console)
        return _many(args, console)
    except KeyboardInterrupt:
        console.print("stopped")
        return _EXIT_STOPPED


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=_SEED, metavar="N", help="simulate this seed alone")
    what.add_argument(
        "--seeds", type=_seeds, metavar="A..B", help="these seeds, B excluded; A.. has no end"
    )
    what.add_argument("--replay", type=Path, metavar="TRACE", help="do again what a trace says")
    parser.add_argument(
        "--steps",
        type=whole_number(1),
        metavar="N",
        help="stop once so many steps were checked; with --seed, of that one "
        f"(default: {DEFAULT_STEPS}, or all seeds of a range that ends)",
    )
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--jobs",
        type=whole_number(1),
        default=cores,
        metavar="N",
        help="processes (default: %(default)s)",
    )
    parser.add_argument(
        "--shrink",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make a failing run as small as it gets (default: yes)",
    )
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where traces go")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write what was done and reached here, as JSON"
    )


def _replay(args: argparse.Namespace, console: Console) -> int:
    try:
        trace = Trace.read(args.replay)
    except (OSError, ValueError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return _EXIT_UNUSABLE
    totals = Totals()
    started_s = time.perf_counter()
    try:
        totals.add(replay(trace))
    except SimFailure as failure:
        return _report_failure(failure, args, console)
    _report(totals, args, console, seconds=time.perf_counter() - started_s)
    return 0


def _one(args: argparse.Namespace, console: Console) -> int:
    totals = Totals()
    started_s = time.perf_counter()
    try:
        totals.add(run_seed(args.seed, max_steps=args.steps))
    except SimFailure as failure:
        return _report_failure(failure, args, console)
    _report(totals, args, console, seconds=time.perf_counter() - started_s)
    return 0


def _many(args: argparse.Namespace, console: Console) -> int:
    first, end = args.seeds or (0, None)
    num_steps: int | None = args.steps or (DEFAULT_STEPS if end is None else None)
    seeds: Iterable[int] = itertools.count(first) if end is None else range(first, end)
    totals, failing, is_stopped = Totals(next_seed=first), None, False
    started_s = time.perf_counter()
    try:
        for outcome in _with_progress(play(seeds, num_jobs=args.jobs), totals, args, console):
            if outcome.report is None:
                failing = outcome
                totals.violations += 1
                break
            totals.add(outcome.report)
            if num_steps is not None and totals.steps >= num_steps:
                break
    except KeyboardInterrupt:
        is_stopped = True
        left = "" if num_steps is None else f" --steps {max(1, num_steps - totals.steps)}"
        until = "" if end is None else end
        console.print(f"go on with: python -m tests.sim --seeds {totals.next_seed}..{until}{left}")
    _report(totals, args, console, seconds=time.perf_counter() - started_s)
    if failing is not None:
        return _report_outcome(failing, args, console)
    return _EXIT_STOPPED if is_stopped else 0


def _with_progress(
    outcomes: Iterator[Outcome], totals: Totals, args: argparse.Namespace, console: Console
) -> Iterator[Outcome]:
    """Pass outcomes on, and show how far they have come; `totals` has those passed on before."""
    if not console.is_terminal:
        yield from _with_lines(outcomes, totals, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        is_range = args.steps is None and args.seeds is not None and args.seeds[1] is not None
        total = args.seeds[1] - args.seeds[0] if is_range else args.steps or DEFAULT_STEPS
        task = progress.add_task("seeds" if is_range else "steps", total=total)
        for outcome in outcomes:
            if outcome.report is not None:
                progress.advance(task, 1 if is_range else outcome.report.steps)
            yield outcome


def _with_lines(outcomes: Iterator[Outcome], totals: Totals, console: Console) -> Iterator[Outcome]:
    started_s = said_s = time.perf_counter()
    for outcome in outcomes:
        yield outcome
        now_s = time.perf_counter()
        if now_s - said_s >= LINE_S:
            said_s = now_s
            rate = totals.steps / (now_s - started_s)
            text = f"{totals.steps:,} steps, {rate:,.0f} steps/s, next seed {totals.next_seed}"
            console.print(text, highlight=False)


def _report(totals: Totals, args: argparse.Namespace, console: Console, *, seconds: float) -> None:
    """Show what was done and reached, and write it where it is wanted."""
    rate = totals.steps / seconds if seconds else 0.0
    figures = asdict(totals) | {"seconds": round(seconds, 1), "steps_per_s": round(rate)}
    figures["coverage"] = dict(sorted(totals.coverage.items()))
    text = json.dumps(figures, indent=2)
    if args.json:
        print(text)
    else:
        _print_totals(totals, console, steps_per_s=rate)
    if args.report is not None:
        args.report.write_text(f"{text}\n", encoding="utf-8")


def _print_totals(totals: Totals, console: Console, *, steps_per_s: float) -> None:
    reached = [f"{count:>9,}  {name}" for name, count in sorted(totals.coverage.items())]
    console.print(Columns(reached, column_first=True), highlight=False)
    console.print(
        f"{totals.steps:,} steps checked ({totals.wire_steps:,} of them with the whole server), "
        f"{totals.seeds:,} seeds, {totals.turns:,} turns, {totals.aborts:,} aborts, "
        f"{totals.closes:,} closes, {totals.faults:,} faults, {totals.violations} violations; "
        f"{steps_per_s:,.0f} steps/s"
    )


def _report_outcome(outcome: Outcome, args: argparse.Namespace, console: Console) -> int:
    """A failure from another process: do it again here."""
    trace = Trace.parse(outcome.trace_lines)
    try:
        replay(trace)
    except SimFailure as failure:
        return _report_failure(failure, args, console)
    console.print(f"[red]seed {outcome.seed}: {escape(outcome.message)}[/]")
    console.print("[red]it does not happen again on replay, which is a fault of its own[/]")
    trace.write(args.out / f"sim-{outcome.seed}.jsonl")
    return _EXIT_FAILED


def _report_failure(failure: SimFailure, args: argparse.Namespace, console: Console) -> int:
    seed, num_ops = failure.trace.config.seed, len(failure.trace.ops)
    console.print(f"[red]seed {seed}, {escape(str(failure))}[/]")
    if args.shrink:
        failure = _shrunk(failure, console)
        console.print(f"{num_ops} operations, {len(failure.trace.ops)} of them matter")
    path = args.out / f"sim-{seed}.jsonl"
    failure.trace.write(path)
    story = Story(NUM_LINES)
    with contextlib.suppress(SimFailure):
        replay(failure.trace, story)
    console.print(LEGEND, highlight=False, markup=False)
    for line in wrapped(story.lines, console.width):
        console.print(line, highlight=False, markup=False)
    console.print(f"[red]{escape(str(failure))}[/]")
    console.print(f"replay: python -m tests.sim --replay {path}", highlight=False, soft_wrap=True)
    if args.json:
        found = {"seed": seed, "layer": failure.layer, "step": failure.step}
        found |= {"message": failure.message, "trace": str(path)}
        print(json.dumps({"failure": found}, indent=2))
    return _EXIT_FAILED


def _shrunk(failure: SimFailure, console: Console) -> SimFailure:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("shrinking", total=MAX_TRIES)

        def on_try(num_tries: int, best: Trace) -> None:
            text = f"shrinking: {len(best.ops)} operations"
            progress.update(task, completed=num_tries, description=text)

        return shrink(failure, on_try=on_try)


def _seeds(text: str) -> tuple[int, int | None]:
    first, dots, end = text.partition("..")
    if not dots:
        raise argparse.ArgumentTypeError(f"give A..B or A.., got {text}")
    seeds = _SEED(first or "0"), _SEED(end) if end else None
    if seeds[1] is not None and seeds[1] <= seeds[0]:
        raise argparse.ArgumentTypeError(f"the range {text} is empty")
    return seeds
