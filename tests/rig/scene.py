"""What all clients of one run share: where the server is, what happened, what is wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.rig.decisions import Decisions
from tests.rig.history import ENDS, Ask, End, SessionLog

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


class Client(ABC):
    """A client by its number: it says and hears things, and writes them down.

    `saw` counts in `scene`; `log` is what it asked and was told.
    """

    def __init__(self, scene: Scene, number: int) -> None:
        self.scene = scene
        self.name = f"{type(self).__name__} {number}"
        self.chance = scene.chance(number)
        self.log = SessionLog()

    @abstractmethod
    async def run(self) -> None:
        """Its whole life."""

    def new_ask(self, body: dict[str, Any]) -> Ask:
        """A turn of these words under a name of its own."""
        return self.log.ask(f"t{len(self.log.asks)}", body)

    def hear_end(self, ask: Ask, end: End) -> None:
        """Be told how a turn ended."""
        for contradiction in self.log.hear(ask.turn_id, end):
            self.problem(contradiction)

    def hear_turn(self, ask: Ask, frame: dict[str, Any]) -> None:
        """Take in one frame of a turn."""
        if frame["type"] == "turn.delta":
            ask.pieces[frame["seq"]] = frame["text"]
        elif frame["type"] in ENDS:
            self.hear_end(ask, End.of_frame(frame))
            if "seq" in frame:
                self.log.ends_heard[frame["seq"]] = (frame["type"], ask.turn_id)

    def problem(self, text: str) -> None:
        """Write down what must not be."""
        self.scene.problems.append(f"{self.name}: {text}")


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


def echo_turn(
    chance: Decisions, turn_id: str, *, max_tokens: int, max_inputs: int = 12
) -> dict[str, Any]:
    """The body of a turn whose answer can be told."""
    sampling = {"max_tokens": max_tokens, "seed": chance.below(1000), "ignore_eos": True}
    input_ids = [chance.between(1, 28) for _ in range(chance.between(1, max_inputs))]
    return {"turn_id": turn_id, "input_ids": input_ids, "sampling": sampling}
