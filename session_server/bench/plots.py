"""Plot figures; matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_growth(turns: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot latency, forward and overhead of every turn over the length of its context.

    Raises:
        ImportError: matplotlib is not installed (`pip install session-server[dev]`).
    """
    from matplotlib import pyplot as plt

    context = [turn["context_tokens"] for turn in turns]
    latency = [turn["latency_ms"] for turn in turns]
    forward = [turn["forward_ms"] for turn in turns]
    overhead = [total - share for total, share in zip(latency, forward, strict=True)]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(context, latency, label="latency at the client", linewidth=0.8)
    axes.plot(context, forward, label="forwards of the turn", linewidth=0.8)
    axes.plot(context, overhead, label="overhead", linewidth=0.8)
    axes.set(xlabel="context, tokens", ylabel="ms per turn", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
