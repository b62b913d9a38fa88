"""Remember where the answers of a conversation end: its items, and the tokens up to each."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from itertools import pairwise
from typing import Self

from session_server.sessions.history_change import AnswersChange


class Answers:
    """Hold, in order, the index of each item that a turn has said, and the length of the history at
    its end. Where a template rewrites its history, these lengths mean nothing."""

    def __init__(self) -> None:
        self._indexes = array("i")
        self._ends = array("i")
        """Inverted (~) if the template has replaced the token that ended the answer."""

        self._num_kept = 0

    @property
    def num_bytes(self) -> int:
        """Return the host memory of all of them."""
        return sys.getsizeof(self._indexes) + sys.getsizeof(self._ends)

    def append(self, index: int, end: int) -> None:
        """Add an answer: its index among the items, and the tokens up to its end."""
        self._indexes.append(index)
        self._ends.append(end)

    def copy(self) -> Self:
        """Return an equal object of its own."""
        copy = type(self)()
        copy._indexes, copy._ends = self._indexes[:], self._ends[:]
        return copy

    def cut(self, num_items: int) -> None:
        """Keep those among the first items."""
        num_kept = bisect_left(self._indexes, num_items)
        del self._indexes[num_kept:], self._ends[num_kept:]
        self._num_kept = min(self._num_kept, num_kept)

    def forget_taken(self) -> None:
        """Have the next `take_change` return all there is."""
        self._num_kept = 0

    def take_change(self) -> AnswersChange:
        """Return what has changed since the last call, or since there were none."""
        num_kept, self._num_kept = self._num_kept, len(self._indexes)
        return AnswersChange(
            num_kept, tuple(self._indexes[num_kept:]), tuple(self._ends[num_kept:])
        )

    def apply(self, change: AnswersChange) -> None:
        """Change as others have that were equal. Raises ValueError if there are too few answers."""
        if change.num_kept > len(self._indexes):
            raise ValueError(f"{change.num_kept} answers stay of {len(self._indexes)}")
        del self._indexes[change.num_kept :], self._ends[change.num_kept :]
        self._indexes.extend(change.indexes)
        self._ends.extend(change.ends)
        self._num_kept = len(self._indexes)

    def check(self, *, num_items: int, num_tokens: int) -> None:
        """Raise ValueError if answers are not in order among so many items, or end behind so many
        tokens."""
        indexes = (-1, *self._indexes, num_items)
        if len(self._indexes) != len(self._ends) or any(a >= b for a, b in pairwise(indexes)):
            raise ValueError(f"the answers are not in order among {num_items} items")
        last_end = max((max(end, ~end) for end in self._ends), default=0)
        if last_end > num_tokens:
            raise ValueError(f"an answer ends at token {last_end} of {num_tokens}")

    def last_before(self, num_items: int) -> int:
        """Return how many items there are up to the last answer among the first ones; 0 without
        an answer."""
        num_answers = bisect_left(self._indexes, num_items)
        return self._indexes[num_answers - 1] + 1 if num_answers else 0

    def first_from(self, index: int, *, default: int) -> int:
        """Return the index of the first answer at `index` or behind it."""
        number = bisect_left(self._indexes, index)
        return self._indexes[number] if number < len(self._indexes) else default

    def end_before(self, num_items: int) -> tuple[int, bool]:
        """Return the tokens up to the end of the last answer among the first items, 0 without one,
        and whether the token that ended it was replaced."""
        num_answers = bisect_left(self._indexes, num_items)
        end = self._ends[num_answers - 1] if num_answers else 0
        return (~end, True) if end < 0 else (end, False)

    def note_replaced(self, keep_len: int) -> int | None:
        """Note that only `keep_len` tokens stay of the history. Return the index of the last answer
        if its end is replaced by that."""
        if not self._indexes:
            return None
        index = self._indexes[-1]
        end, _ = self.end_before(index + 1)
        if keep_len >= end:
            return None
        self._ends[-1] = ~keep_len
        self._num_kept = min(self._num_kept, len(self._ends) - 1)
        return index
