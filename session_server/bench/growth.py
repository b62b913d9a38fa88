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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.client import connect
from session_server.core.session_events import TokenInput
from session_server.local_server import LocalServer

HEAD: Final = slice(1, 11)
TAIL: Final = slice(-10, None)
_FIRST_TOKEN_ID: Final = 300
_TOKEN_ID_SPAN: Final = 1000


@dataclass(frozen=True, slots=True)
class GrowthWorkload:
    """Configure `num_turns` turns of `num_input` new and `num_output` generated tokens."""

    num_turns: int = 300
    num_input: int = 16
    num_output: int = 8

    @property
    def num_tokens(self) -> int:
        """Return the length of the session at its end."""
        return self.num_turns * (self.num_input + self.num_output)


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Hold one turn: context tokens, cached tokens, the client's wait, and the forwards' share."""

    context_tokens: int
    cached_tokens: int
    latency_ms: float
    forward_ms: float
    num_steps: int

    @property
    def overhead_ms(self) -> float:
        """Return everything but forwards: sockets, scheduling, bookkeeping, text."""
        return self.latency_ms - self.forward_ms


@dataclass(frozen=True, slots=True)
class Growth:
    """Compare head (turns 2-11) with tail (the last 10), by medians in milliseconds."""

    turns: tuple[TurnCost, ...]

    def as_json(self) -> dict[str, Any]:
        """Return figures, ratios and every turn."""
        head, tail = self.turns[HEAD], self.turns[TAIL]
        overhead = (_median(head, "overhead_ms"), _median(tail, "overhead_ms"))
        latency = (_median(head, "latency_ms"), _median(tail, "latency_ms"))
        forward = (_median(head, "forward_ms"), _median(tail, "forward_ms"))
        grown = latency[1] - latency[0]
        return {
            "num_turns": len(self.turns),
            "context_tokens": {"head": head[0].context_tokens, "tail": tail[-1].context_tokens},
            "overhead_ms": {"head": overhead[0], "tail": overhead[1]},
            "overhead_ratio": overhead[1] / overhead[0],
            "latency_ms": {"head": latency[0], "tail": latency[1]},
            "latency_ratio": latency[1] / latency[0],
            "forward_ms": {"head": forward[0], "tail": forward[1]},
            "growth_explained_by_forward": (forward[1] - forward[0]) / grown if grown > 0 else 1.0,
            "turns": [asdict(turn) for turn in self.turns],
        }


def measure_growth(load: GrowthWorkload, *, on_turn: Callable[[], None]) -> Growth:
    """Run the workload on a server of its own and call `on_turn` after each turn."""
    context_len = max(16_384, load.num_tokens + 1)
    with tempfile.TemporaryDirectory() as directory:
        model = write_random_checkpoint(Path(directory), RandomModel(context_len=context_len))
        flags = ["--model-path", str(model), "--max-total-tokens", str(2 * context_len)]
        with LocalServer([*flags, "--log-level", "warning"]) as server:
            return Growth(tuple(asyncio.run(_converse(server.url, load, on_turn))))


async def _converse(url: str, load: GrowthWorkload, on_turn: Callable[[], None]) -> list[TurnCost]:
    sampling = {"temperature": 0, "max_tokens": load.num_output, "ignore_eos": True}
    costs = []
    clock = asyncio.get_running_loop().time
    async with await connect(url) as session:
        for turn in range(load.num_turns):
            begin = clock()
            result = await session.ask(ordinary_tokens(turn, load.num_input), sampling=sampling)
            latency_ms = (clock() - begin) * 1e3
            usage, timings = result.usage, result.timings
            costs.append(
                TurnCost(
                    context_tokens=usage.input_tokens,
                    cached_tokens=usage.cached_tokens,
                    latency_ms=latency_ms,
                    forward_ms=timings.forward_ms,
                    num_steps=timings.num_steps,
                )
            )
            on_turn()
    return costs


def ordinary_tokens(turn: int, num_tokens: int) -> TokenInput:
    """Return ordinary token ids (no specials), different in every turn."""
    first = turn * num_tokens
    ids = ((first + i) * 7919 % _TOKEN_ID_SPAN + _FIRST_TOKEN_ID for i in range(num_tokens))
    return TokenInput(tuple(ids))


def _median(turns: Sequence[TurnCost], field: str) -> float:
    return statistics.median(float(getattr(turn, field)) for turn in turns)
