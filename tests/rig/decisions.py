"""Chance that can be repeated: every decision is a hash of a seed, a name and a counter."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

_Choice = TypeVar("_Choice")


class Decisions:
    """A stream of decisions for one thing that has a name, whatever else happens at the time."""

    def __init__(self, seed: int, *name: object) -> None:
        self._prefix = f"{seed}/" + "/".join(map(str, name)) + "/"
        self._counter = 0

    def share(self) -> float:
        """A number in [0, 1)."""
        text = f"{self._prefix}{self._counter}".encode()
        self._counter += 1
        return int.from_bytes(blake2b(text, digest_size=6).digest()) / 2.0**48

    def happens(self, rate: float) -> bool:
        """Whether something with this probability happens."""
        return self.share() < rate

    def below(self, bound: int) -> int:
        """An integer in [0, bound)."""
        return int(self.share() * bound)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[_Choice]) -> _Choice:
        """One of them."""
        return choices[self.below(len(choices))]

    def magnitude(self, bound: int) -> int:
        """An integer in [0, bound), as often between 1 and 2 as between 512 and 1024."""
        return int((bound + 1.0) ** self.share()) - 1
