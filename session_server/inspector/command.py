"""Show what a checkpoint is, and how many of its sessions fit into memory.

Reads the configuration and the headers of the weights: nothing is loaded, and
what `serve` would refuse is refused here, at once and by name. The figures are
those that `serve` works with, under the same flags, variables and file. A GPU
that --device names need not be here, if --memory says how much KV may take.

examples:
  session-server inspect                                     the embedded model
  session-server inspect DIR --lengths 1024,32768     sessions of these lengths
  session-server inspect DIR --memory 16GiB      how many fit in so much memory
  session-server inspect DIR --device cuda --attention-backend triton \\
      --memory 60GiB                                 for a GPU that is not here
  session-server inspect DIR --json | jq .pools          figures for a program

For a running server use `session-server audit`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from session_server import flags
from session_server.config import Settings
from session_server.core.sizes import SIZE_EXAMPLES, parse_size
from session_server.engine_wiring import plan_service, runner_options
from session_server.inspector.report import (
    LayerFigures,
    MemoryFigures,
    ModelFigures,
    PoolFigures,
    Report,
    SessionFigures,
    make_report,
)
from session_server.models.errors import ModelError
from session_server.served_model import open_model
from session_server.store_place import add_config, settings_of_serve
from session_server.terminal import make_table

MEMORY_FLAGS: Final = (
    "--dtype",
    "--kv-cache-dtype",
    "--device",
    "--quantize",
    "--attention-backend",
    "--context-length",
    "--page-size",
    "--mem-fraction-static",
    "--max-total-tokens",
    "--max-resident-sessions",
    "--swa-full-tokens-ratio",
    "--pinned-fraction",
    "--chunked-prefill-size",
    "--disable-overlap-schedule",
)
"""Flags of `serve` that affect memory."""

MAX_LENGTHS: Final = 64
"""Most lengths in one command."""

MAX_LENGTH: Final = 1 << 31
"""Most tokens of one length."""

MAX_SHOWN_RUNS: Final = 3
"""Ranges of layers that are listed; of more, the first two and the last."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `session-server inspect`."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory of a checkpoint, GGUF file, or hub id (none: the embedded model)",
    )
    shown = parser.add_argument_group("figures", "Choose what is shown.")
    shown.add_argument(
        "--lengths",
        type=_lengths,
        default=(),
        metavar="N,N,...",
        help="tokens of the sessions to show (default: some, up to the context)",
    )
    shown.add_argument(
        "--memory",
        type=_num_bytes,
        metavar="SIZE",
        help="for KV, beside the weights, as in 16GiB (default: what `serve` takes of what those "
        "leave)",
    )
    shown.add_argument("--json", action="store_true", help="one JSON object; sizes are bytes")
    add_config(parser.add_argument_group("configuration", "Say where other settings come from."))
    flags.add_flags(parser, [flag for flag in flags.FLAGS if flag.names[0] in MEMORY_FLAGS])


def run(args: argparse.Namespace) -> int:
    """Print the report of a checkpoint. Return 2 if it cannot be served with these flags."""
    try:
        report = _report(args)
    except (ModelError, ValueError) as error:
        print(f"session-server inspect: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(asdict(report), indent=2))
        return 0
    console = Console()
    console.print(headline(report.model), highlight=False)
    console.print(layer_table(report.layers))
    console.print(session_table(report.pools, report.sessions))
    console.print(memory_line(report.memory, report.pools), highlight=False)
    if report.assumed:
        console.print(absence_line(report), highlight=False)
    return 0


def headline(model: ModelFigures) -> str:
    """Format name, size and context in two lines."""
    active = (
        f", {_count(model.active_parameters)} of them met by a token"
        if model.active_parameters < model.parameters
        else ""
    )
    context = f"context {model.context_len:,}"
    if model.context_len < model.model_context_len:
        context += f" of {model.model_context_len:,}"
    return (
        f"[bold]{escape(model.model_type)}[/] · {_count(model.parameters)} parameters{active} · "
        f"vocabulary {model.vocab_size:,} · hidden {model.hidden_size:,} · "
        f"{context}\n"
        f"weights: {_size(model.stored_bytes)} in files ({model.stored_dtype}), "
        f"{_size(model.weight_bytes)} in memory ({model.dtype} on {model.device})"
    )


def layer_table(layers: Iterable[LayerFigures]) -> Table:
    """Build a table with one row per kind of layer."""
    left = (Column(name) for name in ("attention", "heads", "feed-forward"))
    table = make_table(("layers", "", *left))
    for figures in layers:
        window = f" of {figures.window:,}" if figures.window else ""
        heads = ""
        if figures.num_heads:
            heads = f"{figures.num_heads}, {figures.num_kv_heads} of KV, {figures.head_dim} wide"
        ffn = f"{figures.ffn_size:,}"
        if figures.num_experts:
            ffn = f"{figures.num_chosen_experts} of {figures.num_experts} experts of {ffn}"
        if figures.shared_size:
            ffn += f", shared {figures.shared_size:,}"
        where = layer_ranges(figures.layers)
        table.add_row(str(len(figures.layers)), where, f"{figures.kind}{window}", heads, ffn)
    return table


def session_table(pools: tuple[PoolFigures, ...], sessions: Iterable[SessionFigures]) -> Table:
    """Build a table of the bytes of a token and of sessions in each pool, and how many fit."""
    together = ["together"] if len(pools) > 1 else []
    names = ["", *(f"pool {pool.name}" for pool in pools), *together, "fit"]
    title = f"KV as {pools[0].dtype}, in pages of {pools[0].page_size} tokens"
    table = make_table(names, title=title)
    table.add_row("a token", *_cells([pool.bytes_per_token for pool in pools]), "")
    for session in sessions:
        cells = _cells([session.bytes[pool.name] for pool in pools])
        fit = "too long" if session.is_too_long else f"{session.fit:,}"
        table.add_row(f"{session.length:,} tokens", *cells, fit)
    table.add_section()
    table.add_row("all pages", *_cells([pool.bytes for pool in pools]), "")
    return table


def memory_line(memory: MemoryFigures, pools: Iterable[PoolFigures]) -> str:
    """Format how much memory holds KV, and what limits it."""
    pages = ", ".join(f"{pool.pages:,} pages of pool {pool.name}" for pool in pools)
    return (
        f"{_size(memory.kv_bytes)} of {_size(memory.free_bytes)} for KV: {memory.reason}.\n"
        f"{pages}.\nAt most {memory.rows:,} sessions hold KV at the same time.\n"
        "The column [i]fit[/] counts parked sessions; a running turn holds more."
    )


def absence_line(report: Report) -> str:
    """Format what is assumed of a device that is not here, and the memory that it must have."""
    needed = report.model.weight_bytes + report.memory.kv_bytes
    return (
        f"{report.model.device} is not here. It is assumed that it {report.assumed}. Weights and "
        f"KV take {_size(needed)} of it; `serve` also needs memory to compute in."
    )


def layer_ranges(layers: Iterable[int]) -> str:
    """Format indices of layers as ranges: `0-4`, `0-4, 6-10 ... 24-25`."""
    by_run = groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    runs = [[index for _, index in run] for _, run in by_run]
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    if len(words) > MAX_SHOWN_RUNS:
        return f"{words[0]}, {words[1]} ... {words[-1]}"
    return ", ".join(words)


def _report(args: argparse.Namespace) -> Report:
    if args.model is not None and "://" in args.model:
        raise ValueError(
            f"{args.model} is an address; a server is asked with: "
            f"session-server audit --url {args.model}"
        )
    settings = settings_of_serve(flags.given_by(args), args.config)
    path = args.model or settings.model.path
    model = settings.model.model_copy(update={"path": path})
    settings = settings.model_copy(update={"model": model})
    directory = asyncio.run(_opened(settings))
    options = runner_options(settings)
    if args.memory is not None:
        fraction = options.memory.fraction or 1.0
        limits = replace(options.memory, free_bytes=args.memory, fraction=fraction)
        options = replace(options, memory=limits)
    plan = plan_service(settings, options)
    return make_report(str(directory), plan.found, args.lengths, max_turn_len=plan.max_turn_len)


async def _opened(settings: Settings) -> Path:
    """Return the directory of the model's files; reject what `serve` would reject."""
    directory, text = await open_model(settings)
    await text.close()
    return directory


def _cells(sizes: list[int]) -> list[str]:
    together = [sum(sizes)] if len(sizes) > 1 else []
    return [_size(num_bytes) for num_bytes in (*sizes, *together)]


def _size(num_bytes: int) -> str:
    if num_bytes < 10 * 1024:
        return f"{num_bytes:,} B"
    size, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.1f} {unit}"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _lengths(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if len(words) > MAX_LENGTHS or not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"up to {MAX_LENGTHS} numbers of tokens, as 1024,32768; got {text!r}"
        )
    lengths = tuple(map(int, words))
    if not all(1 <= length <= MAX_LENGTH for length in lengths):
        raise argparse.ArgumentTypeError(f"lengths lie between 1 and {MAX_LENGTH}, got {text!r}")
    return lengths


def _num_bytes(text: str) -> int:
    num_bytes = parse_size(text)
    if num_bytes is None:
        raise argparse.ArgumentTypeError(f"expected {SIZE_EXAMPLES}, got {text!r}")
    return num_bytes
