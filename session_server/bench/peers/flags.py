"""Define the flags of `session-server bench peers`."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path
from typing import Final

from session_server.bench.peers.benchmark import (
    DEFAULT_ROUNDS,
    DEFAULT_WORK_DIR,
    Available,
    PeersWorkload,
)
from session_server.bench.peers.cells import CELLS, KINDS, ROWS
from session_server.bench.peers.generating import is_installed
from session_server.bench.peers.models import SHAPES, prepare_model
from session_server.bench.peers.ours import can_quantize
from session_server.bench.peers.own import OwnWorkload
from session_server.bench.peers.page import NoSection, check_page

NAMES: Final = (
    *("model", "rows", "cells", "only", "rounds", "threads", "llama_server", "work_dir", "short"),
    "markdown",
)
"""Of the flags, in the parsed arguments."""

_LOCAL: Final = ("work_dir", "markdown")
"""What does not change the figures."""

_SHORT_ROUNDS: Final = 3
_MIN_ROUNDS: Final = 3
_SHORT_OWN: Final = OwnWorkload(num_rounds=6)
_SHEETS: Final = ("peers", "own")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, all of them None or False where they are not given."""
    group = parser.add_argument_group(
        "peers",
        "Flags of the benchmark `peers`. All have the same random weights and run in\n"
        "turns, the others stopped. It wants a machine that does nothing else.",
    )
    group.add_argument(
        "--llama-server",
        metavar="PATH",
        help="llama.cpp's server (needs the package gguf); none: llama.cpp is not measured",
    )
    group.add_argument(
        "--model",
        nargs="+",
        metavar="MODEL",
        help=f"any of {', '.join(SHAPES)}, and directories of checkpoints (default: 100m)",
    )
    group.add_argument(
        "--rows", nargs="+", choices=ROWS, help="our types of weights (default: all of them)"
    )
    group.add_argument(
        "--cells",
        nargs="+",
        choices=KINDS,
        help="which kinds of measurements are made (default: all of them)",
    )
    group.add_argument(
        "--only", choices=_SHEETS, help="the comparison, or what our own sessions cost"
    )
    group.add_argument("--rounds", type=int, metavar="N", help="rounds, 3 or more (default: 5)")
    group.add_argument(
        "--threads", type=int, metavar="N", help="threads of each system (default: 2)"
    )
    group.add_argument(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="where models are written, once (default: ~/.cache/session-server/bench)",
    )
    group.add_argument(
        "--short", action="store_true", help="float32 and bfloat16, fewer cells, 3 rounds"
    )
    group.add_argument(
        "--markdown", type=Path, metavar="FILE", help="rewrite the marked section of a page"
    )


def workload(args: argparse.Namespace) -> PeersWorkload:
    """Return what the flags ask for.

    Raises:
        ValueError: a flag has a value that cannot be used; the message says which would do.
    """
    _check(args)
    num_rounds = args.rounds or (_SHORT_ROUNDS if args.short else DEFAULT_ROUNDS)
    own = _SHORT_OWN if args.short else OwnWorkload()
    short_rows = ROWS[:2] if args.short else ROWS
    figures = {KINDS[kind] for kind in args.cells or KINDS}
    return PeersWorkload(
        models=() if args.only == "own" else tuple(args.model or ["100m"]),
        rows=tuple(row for row in ROWS if row in (args.rows or short_rows)),
        cells=tuple(
            cell for cell in CELLS if cell.figure in figures and (cell.is_short or not args.short)
        ),
        num_rounds=num_rounds,
        num_threads=args.threads or 2,
        work_dir=args.work_dir or DEFAULT_WORK_DIR,
        available=Available(args.llama_server, is_installed(), can_quantize()),
        own=None if args.only == "peers" else own,
    )


def one_checkpoint(args: argparse.Namespace) -> Path | None:
    """Return the directory of the model that the flags name; None where they name none.

    Raises:
        ValueError: they name several, or one that is not there; the message says which would do.
    """
    models = args.model or []
    if len(models) > 1:
        raise ValueError(f"--model {' '.join(models)}: `bench {args.benchmark}` measures one")
    try:
        found = [prepare_model(each, args.work_dir or DEFAULT_WORK_DIR) for each in models]
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    return found[0].checkpoint if found else None


def command_of(args: argparse.Namespace) -> str:
    """Return the command that measures the same again, without paths of this machine."""
    words = ["session-server", "bench", "peers"]
    for name in NAMES:
        value = getattr(args, name)
        if value is None or value is False or name in _LOCAL:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            values = value if isinstance(value, list) else [value]
            words += (str(each).rstrip("/").rpartition("/")[2] for each in values)
    return shlex.join(words)


def _check(args: argparse.Namespace) -> None:
    if args.rounds is not None and args.rounds < _MIN_ROUNDS:
        raise ValueError(f"--rounds {args.rounds}: {_MIN_ROUNDS} or more, for a median")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads {args.threads}: 1 or more")
    if args.llama_server is not None and shutil.which(args.llama_server) is None:
        raise ValueError(
            f"--llama-server {args.llama_server}: not a program; name llama.cpp's server"
        )
    for model in args.model or ():
        if model not in SHAPES and not (Path(model) / "config.json").is_file():
            names = ", ".join(SHAPES)
            raise ValueError(f"--model {model}: not one of {names}, nor a checkpoint's directory")
    if args.markdown is not None:
        try:
            check_page(args.markdown)
        except NoSection as error:
            raise ValueError(str(error)) from None
