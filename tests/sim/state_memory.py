"""The recurrent pool of the simulated device: a page is what all tokens before it have come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cache.types import NULL_PAGE, StateMoves

GARBAGE: Final = 0xDEADBEEF
"""What is held that nobody has written, or that a failed forward was to write."""


class StateMemory:
    """States: each is the tag of the last token in it, and the first one where its namespace
    begins."""

    __slots__ = ("_states",)

    def __init__(self, num_states: int) -> None:
        """`num_states`: pages, that of the padding included."""
        self._states = [GARBAGE] * num_states

    def read(self, page: int, root: int) -> int:
        """The state a forward begins with; the padding page stands for the beginning of all."""
        return self._states[page] if page != NULL_PAGE else root

    def leave(self, moves: StateMoves, start: int, tags: Sequence[int]) -> None:
        """Write what a forward leaves that made `tags`, of positions from 0 on, those from `start`
        on by itself."""
        lengths = [length for length, _ in moves.targets]
        assert lengths[-1] == len(tags), "a forward leaves the state at its end"
        assert start < lengths[0], "a forward leaves what it has computed"
        assert lengths == sorted(set(lengths)), "each state once"
        for length, page in moves.targets:
            assert page not in {NULL_PAGE, moves.source}, "nothing that is read is overwritten"
            self._states[page] = tags[length - 1]

    def copy_out(self, page: int) -> list[int]:
        """A state, as a copy beside the forwards reads it."""
        return [self._states[page]]

    def copy_in(self, page: int, cells: Sequence[int]) -> None:
        """Write a state as a copy beside the forwards does."""
        assert page != NULL_PAGE, "nothing is copied to the padding page"
        (self._states[page],) = cells

    def spoil(self, moves: StateMoves) -> None:
        """A forward that failed may have written anything where it was to write."""
        for _, page in moves.targets:
            self._states[page] = GARBAGE

    def damage(self, page: int) -> None:
        """Overwrite a state behind everybody's back: what a probe is there to find."""
        self._states[page] = GARBAGE
