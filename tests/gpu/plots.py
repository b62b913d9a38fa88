"""Draw what the benchmarks of `make gpu-check` have measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GRAPHS, FLOOR = "Triton, graphs", "floor of bytes"
"""Ways to compute a batch, as pictures name them."""

Row = dict[str, Any]


def figures(out: Path, name: str, part: str) -> list[Row]:
    """Return the rows of one part of the benchmark that `name` has written; none if it has none."""
    path = out / f"{name}.json"
    rows: list[Row] = json.loads(path.read_text("utf-8")) if path.exists() else []
    return [row for row in rows if row["part"] == part]


def draw(out: Path) -> Iterator[Path]:
    """Draw every picture that there are figures for, and yield where it is.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    decoded = {
        label: figures(out, name, "decode")
        for name, label in (("decode", GRAPHS), ("eager", "Triton"), ("torch", "torch"))
    }
    if decoded[GRAPHS]:
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        _bars(axes, decoded | {FLOOR: decoded[GRAPHS]})
        axes.set(ylabel="ms a step, two in flight", title="decode: rows x history", yscale="log")
        axes.legend()
        yield _saved(figure, out / "decode.svg")
    prefilled = {
        label: figures(out, name, "prefill")
        for name, label in (("prefill", "Triton"), ("torch", "torch"))
    }
    if any(prefilled.values()):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for label, rows in prefilled.items():
            for num_tokens in sorted({row["tokens"] for row in rows}):
                line = [row for row in rows if row["tokens"] == num_tokens]
                places = [row["history"] for row in line]
                axes.plot(
                    places,
                    [row["ms"] for row in line],
                    marker="o",
                    label=f"{label}, {num_tokens:,} new tokens",
                )
        axes.set(xlabel="history, tokens", ylabel="ms", title="a turn's prefill", yscale="log")
        axes.legend()
        yield _saved(figure, out / "prefill.svg")


def _bars(axes: Any, decoded: dict[str, list[Row]]) -> None:
    """Draw a group of bars for each batch, one for each way to compute it."""
    batches = [(row["rows"], row["history"]) for row in decoded[GRAPHS]]
    width = 0.8 / len(decoded)
    for index, (label, rows) in enumerate(decoded.items()):
        name = "floor_ms" if label == FLOOR else "overlapped_ms"
        times = {(row["rows"], row["history"]): row[name] for row in rows}
        places = [at + index * width for at, batch in enumerate(batches) if batch in times]
        axes.bar(places, [times[b] for b in batches if b in times], width=width, label=label)
    centers = [at + 0.4 - width / 2 for at in range(len(batches))]
    axes.set_xticks(centers, [f"{rows} x {history:,}" for rows, history in batches], rotation=20)


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    return path
