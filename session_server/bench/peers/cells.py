"""Say what is measured, what figure comes of it, and what the goals are: the cells."""

from __future__ import annotations

import enum
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from session_server.bench.peers.system import ServerSize, TurnTrace

LLAMA: Final = "llama.cpp"
TRANSFORMERS: Final = "transformers"

ROWS: Final = ("float32", "bfloat16", "int8")
"""Our types of weights, each compared with the peers' types of the same size."""


class Figure(enum.Enum):
    """Define what is made of the turns of a cell; the value is the unit."""

    STEP_MS = "ms/step"
    """Median time between two tokens while all conversations of the cell generate."""
    TTFT_MS = "ms to the first token"
    TURNS_PER_S = "turns/s"
    TOKENS_PER_S = "tokens/s"

    @property
    def is_better_high(self) -> bool:
        """Return whether more is better."""
        return self in {Figure.TURNS_PER_S, Figure.TOKENS_PER_S}


@dataclass(frozen=True, slots=True)
class Cell:
    """Describe one measurement: `num_sessions` conversations at once, each with `history` tokens
    kept, run `num_turns` turns of `num_new` tokens in and `num_output` out, one after the other.

    `goal`: how many times better than the best peer we want to be. `peer`: whom it is measured
    against. `is_short`: whether the short benchmark has it. Where `history` is 0, every visit
    begins new conversations.
    """

    name: str
    figure: Figure
    num_sessions: int
    history: int
    num_turns: int
    num_new: int
    num_output: int
    goal: float
    peer: str = LLAMA
    is_short: bool = True

    def context_len(self, num_rounds: int) -> int:
        """Return how many tokens a conversation has after all rounds, and a few to spare."""
        num_visits = num_rounds if self.history else 1
        turn_len = self.num_new + self.num_output
        return self.history + num_visits * self.num_turns * turn_len + 32


def _decode(num_sessions: int, history: int, goal: float) -> Cell:
    name = f"decode, batch {num_sessions} on {history:,}, ms"
    return Cell(name, Figure.STEP_MS, num_sessions, history, 1, 1, 32, goal)


def _first_token(history: int, goal: float) -> Cell:
    name = f"TTFT, 64 new on {history:,}, ms"
    return Cell(name, Figure.TTFT_MS, 1, history, 1, 64, 1, goal)


CELLS: Final = (
    _decode(1, 0, 1.0),
    _decode(4, 0, 1.0),
    _decode(8, 0, 1.0),
    _decode(1, 2048, 1.1),
    _decode(4, 2048, 1.3),
    _decode(8, 2048, 1.3),
    _first_token(0, 1.0),
    _first_token(1024, 1.2),
    _first_token(4096, 1.5),
    Cell("8 x 20 turns of 16 / 8, turns/s", Figure.TURNS_PER_S, 8, 0, 20, 16, 8, 1.3),
    Cell(
        "16 x 64 / 32 on 2,048, turns/s", Figure.TURNS_PER_S, 16, 2048, 1, 64, 32, 1.3,
        is_short=False,
    ),
    Cell(
        "8 requests of 16 / 32, tokens/s", Figure.TOKENS_PER_S, 8, 0, 1, 16, 32, 10.0,
        peer=TRANSFORMERS,
    ),
)  # fmt: skip
"""Every cell, in the order of the tables."""

KINDS: Final[Mapping[str, Figure]] = MappingProxyType(
    {
        "decode": Figure.STEP_MS,
        "ttft": Figure.TTFT_MS,
        "turns": Figure.TURNS_PER_S,
        "requests": Figure.TOKENS_PER_S,
    }
)
"""Kinds of cells, by what a flag calls them."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Group cells that one start of the servers serves: those with as many conversations at once,
    against the same peer."""

    num_sessions: int
    peer: str
    cells: tuple[Cell, ...]

    def server_size(self, num_rounds: int, num_threads: int) -> ServerSize:
        """Return what the servers must hold."""
        context_len = max(cell.context_len(num_rounds) for cell in self.cells)
        return ServerSize(self.num_sessions, context_len, num_threads)


def scenarios(cells: Iterable[Cell]) -> list[Scenario]:
    """Return cells grouped by conversations and peer, short histories first."""
    in_order = sorted(cells, key=lambda cell: (cell.num_sessions, cell.peer, cell.history))
    groups = itertools.groupby(in_order, key=lambda cell: (cell.num_sessions, cell.peer))
    return [Scenario(*key, tuple(group)) for key, group in groups]


def figure_of(figure: Figure, turns_by_session: Sequence[Sequence[TurnTrace]]) -> float:
    """Return what a visit showed, from the turns of each of its conversations, in order."""
    turns = [turn for of_session in turns_by_session for turn in of_session]
    elapsed_s = max(turn.last_s for turn in turns) - min(turn.begun_s for turn in turns)
    match figure:
        case Figure.STEP_MS:
            return statistics.median(_gaps_s(turns)) * 1e3
        case Figure.TTFT_MS:
            return statistics.median(turn.first_s - turn.begun_s for turn in turns) * 1e3
        case Figure.TURNS_PER_S:
            return len(turns) / elapsed_s
        case Figure.TOKENS_PER_S:
            return sum(turn.num_tokens for turn in turns) / elapsed_s


def _gaps_s(turns: Sequence[TurnTrace]) -> list[float]:
    """Return the times between tokens that arrived while every turn generated.

    Tokens that arrive as one share the time since those before them. If no two arrivals lie
    within that span, all gaps count.
    """
    begin, end = max(turn.first_s for turn in turns), min(turn.last_s for turn in turns)
    gaps = [
        ((at - before) / count, count, begin <= before and at <= end)
        for turn in turns
        for (before, _), (at, count) in itertools.pairwise(turn.arrivals)
    ]
    inside = [(gap, count) for gap, count, is_inside in gaps if is_inside]
    chosen = inside or [(gap, count) for gap, count, _ in gaps]
    return [gap for gap, count in chosen for _ in range(count)]
