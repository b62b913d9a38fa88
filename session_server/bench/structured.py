"""Measure what a grammar costs: a step of turns held to a JSON schema, and of the same turns free.

One server, a random model. Rounds alternate, so that a machine whose speed drifts affects both
alike, and ratios are taken within a round. The prompts, lengths and temperature are the same; only
what may be said differs.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.growth import ordinary_tokens
from session_server.bench.sheet import Sheet
from session_server.client import TurnResult, connect
from session_server.local_server import LocalServer

KINDS: Final = ("free", "held")

HUNDRED_MILLION: Final = RandomModel(
    hidden_size=768,
    num_hidden_layers=14,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
    intermediate_size=2048,
    max_position_embeddings=1024,
)
"""The shape of a model with about so many parameters."""

SCHEMA: Final[Mapping[str, Any]] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["red", "green", "blue"]},
            "size": {"type": "number", "minimum": 0, "maximum": 1000},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
}
"""Never fulfilled within a turn, so that every turn has all its tokens."""


@dataclass(frozen=True, slots=True)
class StructuredWorkload:
    """Configure `num_rounds` rounds of `num_sessions` turns of `num_outputs` tokens, per kind."""

    num_sessions: int = 16
    num_outputs: int = 48
    num_rounds: int = 7
    shape: RandomModel = HUNDRED_MILLION

    @property
    def total_steps(self) -> int:
        """Return the number of rounds of either kind."""
        return self.num_rounds * len(KINDS)


def measure(load: StructuredWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Return medians over the rounds, by kind; call `on_step` after each of them."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_random_checkpoint(Path(directory), load.shape)
        flags = ["--model-path", str(model), "--max-total-tokens", "16384"]
        with LocalServer([*flags, "--log-level", "warning"]) as server:
            return asyncio.run(_alternate(server.url, load, on_step))


SHEETS: Final = (
    Sheet(
        "{num_sessions} turns at a time, medians of {num_rounds} rounds",
        lambda report: report["kinds"],
        ("",),
        {
            "ms / token": "{token_ms:.2f}",
            "ratio": "{ratio:.3f}",
            "range": "{ratio_range[0]:.3f}-{ratio_range[1]:.3f}",
        },
    ),
)


async def _alternate(
    url: str, load: StructuredWorkload, on_step: Callable[[], None]
) -> dict[str, Any]:
    await _round(url, load, "held")  # compiles
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(load.num_rounds):
        for kind in KINDS if number % 2 else reversed(KINDS):
            times[kind].append(await _round(url, load, kind))
            on_step()
    return {
        "num_sessions": load.num_sessions,
        "num_rounds": load.num_rounds,
        "kinds": {kind: _figures(values, times["free"]) for kind, values in times.items()},
    }


def _figures(values: list[float], free: list[float]) -> dict[str, Any]:
    ratios = [value / beside for value, beside in zip(values, free, strict=True)]
    return {
        "token_ms": statistics.median(values),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


async def _round(url: str, load: StructuredWorkload, kind: str) -> float:
    """Return the mean milliseconds from one token of a turn to the next."""
    sampling: dict[str, Any] = {"max_tokens": load.num_outputs, "ignore_eos": True, "seed": 1}
    if kind == "held":
        sampling["json_schema"] = dict(SCHEMA)
    turns = [_turn(url, number, sampling) for number in range(load.num_sessions)]
    done = await asyncio.gather(*turns)
    assert all(turn.usage.output_tokens == load.num_outputs for turn in done), "all their tokens"
    return statistics.mean(turn.timings.decode_ms for turn in done) / (load.num_outputs - 1)


async def _turn(url: str, number: int, sampling: Mapping[str, object]) -> TurnResult:
    async with await connect(url) as session:
        return await session.ask(ordinary_tokens(number, 16), sampling=sampling)
