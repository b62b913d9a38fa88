"""A session over the echo engine as its client knows it, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.chaos.decisions import Decisions
from tests.sim.echo import replay

ENDS = ("turn.completed", "turn.cancelled", "turn.failed")


def echo_turn(
    chance: Decisions, turn_id: str, *, max_tokens: int, max_inputs: int = 12
) -> dict[str, Any]:
    """The body of a turn whose answer can be told."""
    sampling = {"max_tokens": max_tokens, "seed": chance.below(1000), "ignore_eos": True}
    input_ids = [chance.between(1, 28) for _ in range(chance.between(1, max_inputs))]
    return {"turn_id": turn_id, "input_ids": input_ids, "sampling": sampling}


class Reckoning:
    """The history that the server must have, from what it said of each turn, in order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def learn(self, body: Mapping[str, Any], end: Mapping[str, Any]) -> None:
        """A turn ended so: its answer is what follows from the history, to the last token."""
        if end["type"] == "turn.failed":
            return
        context = [*self.tokens, *body["input_ids"]]
        answer, sampling = end["item"]["token_ids"], body["sampling"]
        expected = replay("a", context, seed=sampling["seed"], max_new=len(answer))
        assert answer == expected, "it was computed from another history"
        if end["usage"]["input_tokens"]:  # else it was cancelled in line
            assert end["usage"]["input_tokens"] == len(context)
        if end["type"] == "turn.completed":
            assert len(answer) == sampling["max_tokens"]
        if end["type"] == "turn.completed" or end["kept_partial"]:
            self.tokens = [*context, *answer]
