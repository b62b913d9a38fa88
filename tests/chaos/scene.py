"""What all clients of one run share: where the server is, what happened, what is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.decisions import Decisions

MAX_TURNS = 12
"""Of one session: the server answers again for the last sixteen that ended."""

QUIET_S = 30.0
"""A client that waits for something and hears nothing for so long connects again."""


@dataclass
class Scene:
    """One run. `url` leads through the proxy, `direct_url` past it.

    `saw` counts what clients did and met; `problems` is what must not be, one line each.
    """

    url: str
    direct_url: str
    seed: int
    saw: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def chance(self, number: int) -> Decisions:
        """The decisions of client `number`."""
        return Decisions(self.seed, "client", number)


def some_turn(chance: Decisions, **changes: Any) -> dict[str, Any]:
    """The body of a small turn whose cost in tokens is known."""
    seed = chance.below(1 << 16)
    temperature = chance.pick((0.0, 1.0))
    length = chance.between(1, 24)
    sampling = {"temperature": temperature, "seed": seed, "max_tokens": chance.between(1, 24)}
    input_ids = [chance.between(100, 1400) for _ in range(length)]
    return {"input_ids": input_ids, "sampling": sampling} | changes


def long_turn(chance: Decisions, **changes: Any) -> dict[str, Any]:
    """One that is still running when something is done to it."""
    sampling = {"temperature": 0, "max_tokens": chance.between(24, 64), "ignore_eos": True}
    return some_turn(chance) | {"sampling": sampling} | changes
