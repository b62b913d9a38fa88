"""`TurnQueue`: turns in the order in which they came, or would have with their priority."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import overload

from session_server.engine.turn import Turn


class TurnQueue(Sequence[Turn]):
    """Hold turns in `Turn.order`. `version` changes with every turn that comes or goes."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self.version = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)

    @overload
    def __getitem__(self, index: int) -> Turn: ...

    @overload
    def __getitem__(self, index: slice) -> list[Turn]: ...

    def __getitem__(self, index: int | slice) -> Turn | list[Turn]:
        return self._turns[index]

    def insert(self, turn: Turn) -> None:
        """Insert a turn at its place. O(log turns) comparisons."""
        self.version += 1
        bisect.insort(self._turns, turn, key=lambda other: other.order)

    def remove(self, turn: Turn) -> None:
        """Remove a turn. O(log turns) comparisons."""
        self.version += 1
        index = bisect.bisect_left(self._turns, turn.order, key=lambda other: other.order)
        assert self._turns[index] is turn, "every turn has an order of its own"
        del self._turns[index]
