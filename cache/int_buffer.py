"""`IntBuffer`: hold an int32 array that grows and is cut at its end.

Token histories, tree edges and lock counts are such arrays. Appending costs O(new values).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MIN_CAPACITY = 8


class IntBuffer:
    """Hold a growable int32 array with amortized O(new) appends.

    `tail` is a list for a caller that appends values one by one, which takes a tenth of the time:
    the next call of any method moves them to the array.
    """

    __slots__ = ("_data", "_length", "_readable", "_tail")

    def __init__(self, values: Sequence[int] | NDArray[np.int32] = ()) -> None:
        self._tail: list[int] | None = None
        self._hold(np.array(values, dtype=np.int32))
        self._length = len(self._data)

    def __len__(self) -> int:
        return self._length + len(self._tail) if self._tail else self._length

    @property
    def tail(self) -> list[int]:
        """Return the list for values behind the array; always the same one."""
        if self._tail is None:
            self._tail = []
        return self._tail

    def append(self, values: Sequence[int] | NDArray[np.int32]) -> None:
        """Append a copy of `values`."""
        self._take_tail()
        self._append(values)

    def truncate(self, length: int) -> None:
        """Remove all values from index `length` on.

        The capacity stays within four times the length, so a long turn that is cut off leaves no
        memory behind; a buffer loses half of its capacity at least, so that is amortized O(1).
        """
        self._take_tail()
        assert 0 <= length <= self._length, "a cut lies inside the buffer"
        self._length = length
        if len(self._data) > max(4 * length, _MIN_CAPACITY):
            self._resize(max(2 * length, _MIN_CAPACITY))

    def put(self, index: int, value: int) -> None:
        """Replace one value."""
        self._take_tail()
        assert 0 <= index < self._length, "only what is there is replaced"
        self._data[index] = value

    def add(self, start: int, end: int, amount: int) -> None:
        """Add `amount` to every value of [start, end)."""
        self._take_tail()
        values = self._data[start : min(end, self._length)]
        values += amount

    def exclusive_or(self, start: int, end: int, value: int) -> None:
        """Replace every value of [start, end) by its exclusive or with `value`."""
        self._take_tail()
        values = self._data[start : min(end, self._length)]
        values ^= value

    def view(self, start: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """Return [start, end) as a read-only view.

        Valid until the next `append` or `truncate`; copy what must live longer.
        """
        self._take_tail()
        stop = self._length if end is None else min(end, self._length)
        return self._readable[start:stop]

    def copy(self, start: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """Return a copy of [start, end)."""
        return self.view(start, end).copy()

    def _take_tail(self) -> None:
        if self._tail:
            self._append(self._tail)
            self._tail.clear()

    def _append(self, values: Sequence[int] | NDArray[np.int32]) -> None:
        end = self._length + len(values)
        if end > len(self._data):
            self._resize(max(end, 2 * len(self._data), _MIN_CAPACITY))
        self._data[self._length : end] = values
        self._length = end

    def _resize(self, capacity: int) -> None:
        data = np.empty(capacity, dtype=np.int32)
        data[: self._length] = self._data[: self._length]
        self._hold(data)

    def _hold(self, data: NDArray[np.int32]) -> None:
        # Slices of a read-only array are read-only: marking each of them would cost more than
        # slicing.
        self._data = data
        self._readable = data.view()
        self._readable.flags.writeable = False
