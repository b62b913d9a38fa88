"""What clients say, fixed before any server hears it: the same for every configuration."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn. It builds on the history without its last `num_dropped` tokens, and adds `tokens`.

    `num_kept`: the client ends it after so many outputs, as a stop string does; None for a turn
    that ends by itself.
    """

    name: str
    num_dropped: int
    tokens: tuple[int, ...]
    sampling: dict[str, Any]
    num_kept: int | None


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """One conversation: the history it is opened with, and its turns."""

    name: str
    opening: tuple[int, ...]
    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """How long things are in a trace: ranges of tokens and turns, both ends included."""

    num_turns: tuple[int, int] = (1, 7)
    num_inputs: tuple[int, int] = (1, 4)
    num_outputs: tuple[int, int] = (1, 6)
    num_dropped: tuple[int, int] = (1, 9)


def make_trace(
    name: str, num_turns: int, *, vocab_size: int, size: Size, **sampling: Any
) -> list[PlannedSession]:
    """Sessions with `num_turns` turns together. Some begin alike, some go back in their history,
    some are ended from outside.

    `name`: the seed, and the beginning of every session's name. `sampling`: of every turn, beside
    its length, seed and stop tokens.
    """
    rng = random.Random(name)
    documents = [_tokens(rng, 40, vocab_size) for _ in range(3)]
    sessions: list[PlannedSession] = []
    while num_turns > 0:
        length = min(num_turns, rng.randint(*size.num_turns))
        num_turns -= length
        session = f"{name}{len(sessions)}"
        document = rng.choice(documents)[: rng.choice([0, 0, 3, 9, 18])]
        opening = document[: rng.choice([0, 0, len(document)])]
        turns = []
        for index in range(length):
            new = _tokens(rng, rng.randint(*size.num_inputs), vocab_size)
            if index == 0 and not opening:
                new = document + new
            turn_name = f"{session}.{index}"
            turns.append(
                _turn(rng, turn_name, new, vocab_size=vocab_size, size=size, sampling=sampling)
            )
        sessions.append(PlannedSession(session, opening, tuple(turns)))
    return sessions


def _turn(
    rng: random.Random,
    name: str,
    tokens: tuple[int, ...],
    *,
    vocab_size: int,
    size: Size,
    sampling: dict[str, Any],
) -> PlannedTurn:
    num_outputs = rng.randint(*size.num_outputs)
    own = {
        "max_tokens": num_outputs,
        "seed": rng.randrange(1 << 30),
        "ignore_eos": rng.random() < 0.7,
        "stop_token_ids": _tokens(rng, 2, vocab_size) if rng.random() < 0.3 else (),
    }
    return PlannedTurn(
        name=name,
        num_dropped=rng.randint(*size.num_dropped) if rng.random() < 0.2 else 0,
        tokens=tokens,
        sampling=own | sampling,
        num_kept=rng.randint(1, num_outputs) if rng.random() < 0.2 else None,
    )


def _tokens(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, vocab_size) for _ in range(length))
