"""Measure what a session costs, as ratios taken in one run.

  sessions      whether a turn's overhead, idle sessions and admission stay flat
  kept          the next turn on a kept session against resending all of it
  speculation   answers with drafts from the session's own text, and without
  memory-check  what the memory checker adds to a step, beside idle sessions
  mla           a decode step of latent attention while the history grows
  kv-dtype      a decode step with KV stored in halves, over one with KV in fp32

Shared machines are noisy: quote ratios of one run, and run twice before
believing one.

examples:
  session-server bench kept
  session-server bench sessions --turns 100 --plot growth.png
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from session_server.arguments import whole_number
from session_server.bench.growth import GrowthWorkload, measure_growth
from session_server.bench.host import measure_admission, measure_idle_sessions
from session_server.bench.kept import WAYS, KeptWorkload, measure_kept
from session_server.bench.kv_dtype import KvDtypeWorkload, measure_kv_dtypes
from session_server.bench.memory_check import MemoryCheckWorkload, measure_memory_check
from session_server.bench.mla import MlaWorkload, measure_mla
from session_server.bench.plots import plot_growth
from session_server.bench.speculation import SpeculationWorkload, measure_speculation
from session_server.progress import StepProgress

Figures = dict[str, Any]
Measure = Callable[[argparse.Namespace, StepProgress], Figures]
Show = Callable[[Figures, Console], None]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Describe one benchmark: how to measure it, and how to print its figures."""

    measure: Measure
    show: Show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `session-server bench`."""
    parser.add_argument(
        "benchmark", choices=sorted(BENCHMARKS), metavar="BENCHMARK", help="one of the above"
    )
    sessions = parser.add_argument_group("sessions", "Flags of the benchmark `sessions`.")
    sessions.add_argument(
        "--turns",
        type=whole_number(22, 10_000),
        metavar="N",
        default=300,
        help="turns of the session (default: 300)",
    )
    sessions.add_argument("--plot", type=Path, metavar="PNG", help="draw it (needs matplotlib)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run one benchmark and return 0 when it finished. Figures never change the exit status."""
    console = Console(stderr=args.json)
    benchmark = BENCHMARKS[args.benchmark]
    with StepProgress(console) as progress:
        figures = benchmark.measure(args, progress)
    report = {"benchmark": args.benchmark, "machine": _machine(), **figures}
    if args.plot is not None and args.benchmark == "sessions":
        plot_growth(report["growth"]["turns"], args.plot)
        console.print(f"plot written to {args.plot}")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        benchmark.show(report, console)
    return 0


def _measure_sessions(args: argparse.Namespace, progress: StepProgress) -> Figures:
    load = GrowthWorkload(num_turns=args.turns)
    task = progress.add_task("turns in one session", total=load.num_turns)
    growth = measure_growth(load, on_turn=lambda: progress.advance(task))
    rounds = progress.add_task("decode steps beside idle sessions", total=None)
    idle = measure_idle_sessions((0, 1000, 5000), on_round=lambda: progress.advance(rounds))
    admissions = progress.add_task("admissions", total=None)
    admission = measure_admission((0, 8192), on_round=lambda: progress.advance(admissions))
    return {"growth": growth.as_json(), "idle_sessions": idle, "admission": admission}


def _show_sessions(report: Figures, console: Console) -> None:
    growth = report["growth"]
    table = Table(title=f"one session, {growth['num_turns']} turns of 16 in / 8 out (median ms)")
    for column in ("", "turns 2-11", "last 10", "ratio"):
        table.add_column(column, justify="right")
    for name in ("overhead_ms", "forward_ms", "latency_ms"):
        head, tail = growth[name]["head"], growth[name]["tail"]
        table.add_row(name, f"{head:.2f}", f"{tail:.2f}", f"{tail / head:.3f}")
    console.print(table)
    for title, key in (
        ("engine host time of a decode step, by idle sessions", "idle_sessions"),
        ("engine host time of admitting a turn, by history", "admission"),
    ):
        table = Table(title=title)
        for column in ("", "us", "ratio to the first"):
            table.add_column(column, justify="right")
        for size, figure in report[key].items():
            table.add_row(size, f"{figure['median_us']:.1f}", f"{figure['ratio']:.3f}")
        console.print(table)


def _measure_kept(args: argparse.Namespace, progress: StepProgress) -> Figures:
    load = KeptWorkload()
    total = len(load.histories) * load.num_rounds * len(WAYS)
    task = progress.add_task("turns", total=total)
    return measure_kept(load, on_turn=lambda: progress.advance(task))


def _show_kept(report: Figures, console: Console) -> None:
    table = Table(title=f"next turn, {report['num_new']} new tokens: time to first token, ms")
    for column in ("history", *WAYS, "resent / kept", "cold / kept"):
        table.add_column(column, justify="right")
    for history, figure in report["histories"].items():
        medians = (f"{figure['median_ms'][way]:.1f}" for way in WAYS)
        ratios = (f"{figure['resent_over_kept']:.2f}", f"{figure['cold_over_kept']:.2f}")
        table.add_row(history, *medians, *ratios)
    console.print(table)


def _measure_speculation(_: argparse.Namespace, progress: StepProgress) -> Figures:
    load = SpeculationWorkload()
    task = progress.add_task("visits", total=load.num_visits)
    return measure_speculation(load, on_visit=lambda: progress.advance(task))


def _show_speculation(report: Figures, console: Console) -> None:
    for workload, by_drafts in report["workloads"].items():
        table = Table(title=f"{workload}: n-gram drafts, medians of {report['num_rounds']} rounds")
        columns = ("drafts", "tokens / forward", "tokens / s", "speed ratio", "range", "different")
        for column in columns:
            table.add_column(column, justify="right")
        for num_drafts, figure in by_drafts.items():
            low, high = figure["speed_ratio_range"]
            table.add_row(
                num_drafts,
                f"{figure['tokens_per_forward']:.2f}",
                f"{figure['tokens_per_s']:.0f}",
                f"{figure['speed_ratio']:.2f}",
                f"{low:.2f}-{high:.2f}",
                str(figure["different_answers"]),
            )
        console.print(table)


def _measure_memory_check(args: argparse.Namespace, progress: StepProgress) -> Figures:
    load = MemoryCheckWorkload()
    task = progress.add_task("rounds", total=load.total_rounds)
    return measure_memory_check(load, on_round=lambda: progress.advance(task))


def _show_memory_check(report: Figures, console: Console) -> None:
    table = Table(title="step of a turn of 16 in / 32 out, medians of rounds, us")
    for column in ("", "off", "warn", "warn / off", "off / off", "checks", "probes", "share"):
        table.add_column(column, justify="right")
    for name, figure in report["variants"].items():
        times = (f"{figure[key]:.1f}" for key in ("off_us", "on_us"))
        ratios = (f"{figure[key]:.3f}" for key in ("ratio", "noise_ratio"))
        own = (f"{figure[key]:.2f}" for key in ("check_us", "probe_us"))
        table.add_row(name, *times, *ratios, *own, f"{figure['own_share']:.2%}")
    console.print(table)
    console.print(
        f"{report['probes']} probes, {report['probe_ms'] or 0:.1f} ms each, "
        f"{report['violations']} violations"
    )


def _measure_mla(_: argparse.Namespace, progress: StepProgress) -> Figures:
    load = MlaWorkload()
    task = progress.add_task("steps", total=load.total_steps)
    return measure_mla(load, on_step=lambda: progress.advance(task))


def _show_mla(report: Figures, console: Console) -> None:
    sizes = f"{report['num_layers']} layers, {report['bytes_per_layer_token']} bytes per position"
    table = Table(title=f"decode step of latent attention, {sizes}: median ms (ratio)")
    histories = list(next(iter(report["ways"].values())))
    for column in ("", *(f"history {history}" for history in histories)):
        table.add_column(column, justify="right")
    for way, figures in report["ways"].items():
        cells = (
            f"{figure['median_ms']:.2f} ({figure['ratio']:.2f})" for figure in figures.values()
        )
        table.add_row(way, *cells)
    console.print(table)


def _measure_kv_dtypes(_: argparse.Namespace, progress: StepProgress) -> Figures:
    load = KvDtypeWorkload()
    task = progress.add_task("steps", total=load.total_steps)
    return measure_kv_dtypes(load, on_step=lambda: progress.advance(task))


def _show_kv_dtypes(report: Figures, console: Console) -> None:
    table = Table(title="decode step, fp32 weights, by what KV is stored in: ms (speed over fp32)")
    columns = [f"{name}, {size} B a token" for name, size in report["bytes_per_token"].items()]
    for column in ("history", "", *columns):
        table.add_column(column, justify="right")
    for history, by_dtype in report["histories"].items():
        for words, time, speed in (
            ("median", "median_ms", "speed"),
            ("best", "min_ms", "speed_at_best"),
        ):
            cells = (f"{of[time]:.2f} ({of[speed]:.2f})" for of in by_dtype.values())
            table.add_row(history, words, *cells)
    console.print(table)


BENCHMARKS: Final[Mapping[str, Benchmark]] = MappingProxyType(
    {
        "sessions": Benchmark(_measure_sessions, _show_sessions),
        "kept": Benchmark(_measure_kept, _show_kept),
        "memory-check": Benchmark(_measure_memory_check, _show_memory_check),
        "mla": Benchmark(_measure_mla, _show_mla),
        "kv-dtype": Benchmark(_measure_kv_dtypes, _show_kv_dtypes),
        "speculation": Benchmark(_measure_speculation, _show_speculation),
    }
)


def _machine() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }
