"""Measure what a session costs, as ratios taken in one run.

  sessions      whether a turn's overhead, idle sessions and admission stay flat
  kept          the next turn on a kept session against resending all of it
  peers         ours against llama.cpp and transformers, on the same weights
  drafts        the first token after a typed sentence, with drafts and without
  speculation   answers with drafts from the session's own text, and without
  memory-check  what the memory checker adds to a step, beside idle sessions
  structured    what holding answers to a JSON schema adds to a step
  tiers         more sessions than memory holds, and turns after a restart
  store         turns that are on disk when they are told, and starts
  roles         prefill and decode in replicas apart, against two that do both

Shared machines are noisy: quote ratios of one run, and run twice before
believing one.

examples:
  session-server bench kept
  session-server bench sessions --turns 100 --plot growth.png
  session-server bench peers --short
  session-server bench peers --llama-server ./llama-server --plot peers.png
  session-server bench tiers --model 100m --sessions 500 --kept disk
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

from rich.console import Console

from session_server.bench import (
    drafts,
    growth,
    kept,
    memory_check,
    roles,
    speculation,
    store,
    structured,
    tiers,
)
from session_server.bench.peers import benchmark as peers
from session_server.bench.peers import flags as peers_flags
from session_server.bench.peers import page
from session_server.bench.peers.system import PeerFailed
from session_server.local_server import ServerFailed
from session_server.progress import StepProgress

PEER_FAILURES: Final = (PeerFailed, ServerFailed)
"""Errors whose message says what to do."""

_TURNS: Final = range(22, 10_001)
_OWNERS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "turns": frozenset({"sessions"}),
        "shared_store": frozenset({"store", "roles"}),
        "plot": frozenset({"sessions", "peers"}),
        **dict.fromkeys(peers_flags.NAMES, frozenset({"peers"})),
        **dict.fromkeys(tiers.NAMES, frozenset({"tiers"})),
        **dict.fromkeys(("model", "work_dir"), frozenset({"peers", "store", "tiers", "roles"})),
    }
)
"""The benchmarks that a flag belongs to, by its name in the parsed arguments."""


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
    kept = parser.add_argument_group("store", "Flags of the benchmark `store`.")
    kept.add_argument(
        "--shared-store",
        metavar="URL",
        help="postgresql:// of an empty database: measure a server that keeps sessions there too "
        "(`roles` needs one)",
    )
    peers_flags.add_arguments(parser)
    tiers.add_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    output.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw `sessions` or `peers` (needs matplotlib)"
    )


def run(args: argparse.Namespace) -> int:
    """Run one benchmark. Return 0 when it finished, 2 for flags that do not fit, 1 if a server
    failed. Figures never change the exit status."""
    console = Console(stderr=args.json)
    benchmark, workload = BENCHMARKS[args.benchmark]
    try:
        _check_flags(args)
        load = workload(args)
    except ValueError as error:
        print(f"session-server bench: {error}", file=sys.stderr)
        return 2
    # Ended from outside, it still stops its servers, some of which may be paused.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with StepProgress(console) as progress:
            task = progress.add_task("steps", total=load.total_steps)
            figures = benchmark.measure(load, on_step=lambda: progress.advance(task))
    except PEER_FAILURES as error:
        print(f"session-server bench: {error}", file=sys.stderr)
        return 1
    report = {"benchmark": args.benchmark, "machine": _machine(), **figures}
    _write_files(report, args, console)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        console.print(*(sheet.table(report) for sheet in benchmark.SHEETS))
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that belongs to another benchmark."""
    for name, owners in _OWNERS.items():
        is_given = getattr(args, name) is not None and getattr(args, name) is not False
        if is_given and args.benchmark not in owners:
            flag, benches = name.replace("_", "-"), "` and `bench ".join(sorted(owners))
            raise ValueError(f"--{flag} is a flag of `bench {benches}`")


def _of_sessions(args: argparse.Namespace) -> growth.GrowthWorkload:
    if args.turns is None:
        return growth.GrowthWorkload()
    if args.turns not in _TURNS:
        raise ValueError(f"--turns {args.turns}: 22 to 10000")
    return growth.GrowthWorkload(num_turns=args.turns)


def _without_flags(workload: Callable[[], Any]) -> Callable[[argparse.Namespace], Any]:
    return lambda _: workload()


def _write_files(report: dict[str, Any], args: argparse.Namespace, console: Console) -> None:
    if args.plot is not None:
        if args.benchmark == "sessions":
            growth.plot_growth(report["growth"]["turns"], args.plot)
        else:
            page.plot_ratios(report, args.plot)
        console.print(f"plot written to {args.plot}")
    if args.markdown is not None:
        page.write_section(args.markdown, report, peers_flags.command_of(args))
        console.print(f"figures written to {args.markdown}")


def _machine() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


BENCHMARKS: Final[Mapping[str, tuple[ModuleType, Callable[[argparse.Namespace], Any]]]] = (
    MappingProxyType(
        {
            "sessions": (growth, _of_sessions),
            "drafts": (drafts, _without_flags(drafts.DraftsWorkload)),
            "kept": (kept, _without_flags(kept.KeptWorkload)),
            "memory-check": (memory_check, _without_flags(memory_check.MemoryCheckWorkload)),
            "peers": (peers, peers_flags.workload),
            "roles": (roles, roles.workload),
            "speculation": (speculation, _without_flags(speculation.SpeculationWorkload)),
            "structured": (structured, _without_flags(structured.StructuredWorkload)),
            "store": (store, store.workload),
            "tiers": (tiers, tiers.workload),
        }
    )
)
"""What makes a workload of the flags, which has `total_steps`; its module has
`measure(workload, on_step=...)`, which returns figures, and `SHEETS`, which show them."""
