"""Compare: the best peer of every cell, our ratio to it, the goal, and what memory alone costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from rich.table import Column, Table

from session_server.bench.peers.cells import Cell, Figure
from session_server.terminal import make_table

WEIGHT_BYTES: Final = MappingProxyType({"float32": 4.0, "bfloat16": 2.0, "int8": 34 / 32})
"""Of one weight by row; blocks of 32 in int8 have a scale of two bytes."""

KV_BYTES: Final = MappingProxyType({"float32": 4, "bfloat16": 2, "int8": 2})
"""Of one number of keys or values by row."""

QUIET_SHARE: Final = 0.05
"""Of the cores: what others may take of a machine whose figures are worth quoting. Systems whose
threads spin become many times slower when there is more."""

COLUMNS: Final = ("cell", "ours", "theirs", "ratio", "goal", "floor", "best peer")
OWN_COLUMNS: Final = ("cost", "figure", "goal", "")

_MARKS: Final = MappingProxyType({True: " met", False: " MISSED", None: ""})


def compare(
    cell: Cell, rounds: Mapping[str, Sequence[float]], *, floor: float | None
) -> dict[str, Any]:
    """Return the figures of a cell from those of its rounds; the first system is ours.

    `ratio` says how many times better than the best peer we are. Without a peer `best`, `theirs`,
    `ratio` and `met` are None.
    """
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    (_, ours), *peers = medians.items()
    is_high = cell.figure.is_better_high
    best, theirs = None, None
    if peers:
        best, theirs = (max if is_high else min)(peers, key=lambda peer: peer[1])
    ratio = None if theirs is None else (ours / theirs if is_high else theirs / ours)
    return {
        "unit": cell.figure.value,
        "ours": ours,
        "best": best,
        "theirs": theirs,
        "ratio": ratio,
        "goal": cell.goal,
        "met": None if ratio is None else ratio >= cell.goal,
        "floor_ms": floor,
        "medians": medians,
        "rounds": {name: list(values) for name, values in rounds.items()},
    }


def floor_ms(cell: Cell, row: str, sizes: tuple[int, int], bytes_per_s: float) -> float | None:
    """Return how long reading the weights and the KV of a decode step takes; None for other cells
    than decode at batch 1.

    Args:
        cell: what is measured.
        row: our type of weights.
        sizes: the model's weights, and its numbers of keys and values per token.
        bytes_per_s: what memory gives.
    """
    if cell.figure is not Figure.STEP_MS or cell.num_sessions != 1:
        return None
    num_parameters, kv_per_token = sizes
    num_bytes = num_parameters * WEIGHT_BYTES[row] + cell.history * kv_per_token * KV_BYTES[row]
    return num_bytes / bytes_per_s * 1e3


def rows_of(cells: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of one of our types of weights as texts, in the order of `COLUMNS`."""
    for name, cell in cells.items():
        yield (
            name,
            _number(cell["ours"]),
            _number(cell["theirs"]),
            "-" if cell["ratio"] is None else f"{cell['ratio']:.2f}x",
            f"{cell['goal']:.1f}x{_MARKS[cell['met']]}",
            _number(cell["floor_ms"]),
            cell["best"] or "not measured",
        )


def own_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield what our own sessions cost as texts, in the order of `OWN_COLUMNS`."""
    for figure in report["own"]:
        goal = f"{figure['bound']} {figure['goal']:,}"
        yield figure["name"], f"{figure['value']:,.4g}", goal, _MARKS[figure["met"]].strip()


def heading(report: Mapping[str, Any]) -> str:
    """Return what was measured and where, in one sentence."""
    machine = report["conditions"]
    sets = ", ".join(machine["instruction_sets"]) or "no known vector instructions"
    peers = "".join(f", {version}" for version in machine["peers"])
    return (
        f"{machine['date']}, {machine['cores']} cores of {machine['processor']} ({sets}), L3 "
        f"{machine['l3']}, DRAM read {machine['dram_gb_per_s']:.0f} GB/s, {machine['threads']} "
        f"threads, Python {machine['python']}{peers}, medians of {report['num_rounds']} rounds in "
        f"turns; other work took {machine['others_share']:.0%} of the cores"
        f"{'' if machine['others_share'] < QUIET_SHARE else ': too much to quote these figures'}"
    )


class PeerSheets:
    """Show a report on a terminal: a table for every model, one of our own costs, and what was
    not measured."""

    @staticmethod
    def table(report: Mapping[str, Any]) -> Table:
        """Return all of it, as a grid of one column."""
        grid = Table.grid()
        grid.add_row(heading(report))
        for model, rows in report["models"].items():
            for row, cells in rows.items():
                title = f"{model}, {row} (ratio above 1: ours is better)"
                grid.add_row(make_table(_columns(), rows_of(cells), title=title))
        if report["own"]:
            grid.add_row(make_table(OWN_COLUMNS, own_rows(report), title="what a session costs"))
        for reason in report["not_measured"]:
            grid.add_row(f"not measured: {reason}")
        return grid


def _columns() -> Iterator[Column]:
    """Yield the columns of a terminal, of which only the last gives way where it is narrow."""
    *others, best = COLUMNS
    yield from (Column(name, justify="right", no_wrap=True) for name in others)
    yield Column(best)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
