"""Measure what a session costs, as ratios taken in one run.

  sessions      whether a turn's overhead, idle sessions and admission stay flat
  kept          the next turn on a kept session against resending all of it
  drafts        the first token after a typed sentence, with drafts and without
  speculation   answers with drafts from the session's own text, and without
  memory-check  what the memory checker adds to a step, beside idle sessions
  structured    what holding answers to a JSON schema adds to a step

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
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from rich.console import Console

from session_server.bench import drafts, growth, kept, memory_check, speculation, structured
from session_server.progress import StepProgress

BENCHMARKS: Final[Mapping[str, tuple[ModuleType, Callable[..., Any]]]] = MappingProxyType(
    {
        "sessions": (growth, growth.GrowthWorkload),
        "drafts": (drafts, drafts.DraftsWorkload),
        "kept": (kept, kept.KeptWorkload),
        "memory-check": (memory_check, memory_check.MemoryCheckWorkload),
        "speculation": (speculation, speculation.SpeculationWorkload),
        "structured": (structured, structured.StructuredWorkload),
    }
)
"""Each workload has `total_steps`; each module has `measure(workload, on_step=...)`, which returns
figures, and `SHEETS`, which show them."""

_TURNS: Final = range(22, 10_001)
_FLAGS_OF_SESSIONS: Final = "--turns N, 22 to 10000, and --plot are flags of `bench sessions`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `session-server bench`."""
    parser.add_argument(
        "benchmark", choices=sorted(BENCHMARKS), metavar="BENCHMARK", help="one of the above"
    )
    sessions = parser.add_argument_group("sessions", "Flags of the benchmark `sessions`.")
    sessions.add_argument(
        "--turns",
        type=int,
        metavar="N",
        help="turns of the session, 22 to 10000 (default: 300)",
    )
    sessions.add_argument("--plot", type=Path, metavar="PNG", help="draw it (needs matplotlib)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run one benchmark and return 0 when it finished. Figures never change the exit status."""
    console = Console(stderr=args.json)
    benchmark, workload = BENCHMARKS[args.benchmark]
    is_foreign = benchmark is not growth and (args.turns, args.plot) != (None, None)
    if is_foreign or (args.turns is not None and args.turns not in _TURNS):
        print(f"session-server bench: {_FLAGS_OF_SESSIONS}", file=sys.stderr)
        return 2
    load = workload() if args.turns is None else workload(num_turns=args.turns)
    with StepProgress(console) as progress:
        task = progress.add_task("steps", total=load.total_steps)
        figures = benchmark.measure(load, on_step=lambda: progress.advance(task))
    report = {"benchmark": args.benchmark, "machine": _machine(), **figures}
    if args.plot is not None:
        growth.plot_growth(report["growth"]["turns"], args.plot)
        console.print(f"plot written to {args.plot}")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        console.print(*(sheet.table(report) for sheet in benchmark.SHEETS))
    return 0


def _machine() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }
