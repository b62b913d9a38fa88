"""Measure B1: whether a turn's *overhead* stays flat while its session grows.

One session of a small random model runs turn after turn of the same size, over a real socket to a
separate server process. The overhead of a turn is the time its client waited minus the time of the
forwards that computed it. Attention over the history grows on any device and belongs to the
forward; nothing else may grow.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from session_server.bench import host, sockets
from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.sheet import Sheet
from session_server.client import connect
from session_server.core.session_events import TokenInput
from session_server.local_server import LocalServer

HEAD: Final = slice(1, 11)
TAIL: Final = slice(-10, None)
_TIMES: Final = ("overhead_ms", "forward_ms", "latency_ms")
_FIRST_TOKEN_ID: Final = 300
_TOKEN_ID_SPAN: Final = 1000


@dataclass(frozen=True, slots=True)
class GrowthWorkload:
    """Configure `num_turns` turns of `num_input` new and `num_output` generated tokens."""

    num_turns: int = 300
    num_input: int = 16
    num_output: int = 8

    @property
    def total_steps(self) -> int:
        """Return the turns, plus the measurements without a model."""
        return self.num_turns + sockets.NUM_TURNS + host.TOTAL_STEPS


def measure(load: GrowthWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Measure how a turn's costs grow with its session, with idle sessions, and with history."""
    return {
        "growth": measure_growth(load, on_step=on_step),
        "sockets": sockets.measure_sockets(on_step=on_step),
        "running": host.measure_running(host.RUNNING_COUNTS, on_step=on_step),
        "idle_sessions": host.measure_idle_sessions(host.IDLE_COUNTS, on_step=on_step),
        "admission": host.measure_admission(host.HISTORIES, on_step=on_step),
    }


def measure_growth(load: GrowthWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Run the workload on a server of its own and call `on_step` after each turn.

    Return figures of every turn, and medians of turns 2-11 (head) and of the last 10 (tail).
    """
    num_tokens = load.num_turns * (load.num_input + load.num_output)
    context_len = max(16_384, num_tokens + 1)
    with tempfile.TemporaryDirectory() as directory:
        model = write_random_checkpoint(
            Path(directory), RandomModel(max_position_embeddings=context_len)
        )
        flags = ["--model-path", str(model), "--max-total-tokens", str(2 * context_len)]
        with LocalServer([*flags, "--log-level", "warning"]) as server:
            turns = asyncio.run(_converse(server.url, load, on_step))
    medians = {name: _grown(turns, name) for name in _TIMES}
    latency, forward = (medians[name] for name in ("latency_ms", "forward_ms"))
    grown = latency["tail"] - latency["head"]
    return {
        "num_turns": len(turns),
        "context_tokens": {
            "head": turns[HEAD][0]["context_tokens"],
            "tail": turns[-1]["context_tokens"],
        },
        **medians,
        "overhead_ratio": medians["overhead_ms"]["ratio"],
        "latency_ratio": latency["ratio"],
        "growth_explained_by_forward": (
            (forward["tail"] - forward["head"]) / grown if grown > 0 else 1.0
        ),
        "turns": turns,
    }


SHEETS: Final = (
    Sheet(
        "one session, {growth[num_turns]} turns of 16 in / 8 out (median ms)",
        lambda report: {name: report["growth"][name] for name in _TIMES},
        ("",),
        {"turns 2-11": "{head:.2f}", "last 10": "{tail:.2f}", "ratio": "{ratio:.3f}"},
    ),
    sockets.SHEET,
    *host.SHEETS,
)


def plot_growth(turns: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot latency, forward and overhead of every turn over the length of its context.

    Raises:
        ImportError: matplotlib is not installed (`pip install session-server[dev]`).
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    context = [turn["context_tokens"] for turn in turns]
    for name, label in (
        ("latency_ms", "latency at the client"),
        ("forward_ms", "forwards of the turn"),
        ("overhead_ms", "overhead"),
    ):
        axes.plot(context, [turn[name] for turn in turns], label=label, linewidth=0.8)
    axes.set(xlabel="context, tokens", ylabel="ms per turn", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


async def _converse(
    url: str, load: GrowthWorkload, on_step: Callable[[], None]
) -> list[dict[str, float]]:
    sampling = {"temperature": 0, "max_tokens": load.num_output, "ignore_eos": True}
    turns = []
    clock = asyncio.get_running_loop().time
    async with await connect(url) as session:
        for turn in range(load.num_turns):
            begin = clock()
            result = await session.ask(ordinary_tokens(turn, load.num_input), sampling=sampling)
            latency_ms = (clock() - begin) * 1e3
            figures = {
                "context_tokens": result.usage.input_tokens,
                "cached_tokens": result.usage.cached_tokens,
                "latency_ms": latency_ms,
                "forward_ms": result.timings.forward_ms,
                # Everything but forwards: sockets, scheduling, bookkeeping, text.
                "overhead_ms": latency_ms - result.timings.forward_ms,
                "num_steps": result.timings.num_steps,
            }
            turns.append(figures)
            on_step()
    return turns


def ordinary_tokens(turn: int, num_tokens: int) -> TokenInput:
    """Return ordinary token ids (no specials), different in every turn."""
    first = turn * num_tokens
    ids = ((first + i) * 7919 % _TOKEN_ID_SPAN + _FIRST_TOKEN_ID for i in range(num_tokens))
    return TokenInput(tuple(ids))


def _grown(turns: Sequence[Mapping[str, float]], name: str) -> dict[str, float]:
    head, tail = (statistics.median(turn[name] for turn in turns[part]) for part in (HEAD, TAIL))
    return {"head": head, "tail": tail, "ratio": tail / head}
