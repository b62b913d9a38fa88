"""JSON values that grow: each part is encoded once, however often the whole is sent.

What is long is encoded in slices. The caller may let others go on between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

SLICE_LENGTH: Final = 64
"""Entries encoded in one go. With twenty alternatives a token's scores take about 10 µs, with their
texts 100."""

T = TypeVar("T")


class GrowingArray:
    """A JSON array."""

    def __init__(self) -> None:
        self._encoded = bytearray(b"[")

    def extend(self, values: Sequence[Any]) -> None:
        """Encode further values."""
        if values:
            if len(self._encoded) > 1:
                self._encoded += b","
            self._encoded += msgspec.json.encode(values)[1:-1]

    def extend_in_slices(self, values: Sequence[T], body_of: Callable[[T], Any]) -> Iterator[None]:
        """Encode further values as `body_of` shows them, a slice per step."""
        for start in range(0, len(values), SLICE_LENGTH):
            if start:
                yield
            self.extend([body_of(value) for value in values[start : start + SLICE_LENGTH]])

    def value(self) -> msgspec.Raw:
        """Return the whole of it, for msgspec to put into another value."""
        return msgspec.Raw(bytes(self._encoded) + b"]")


class GrowingString:
    """A JSON string."""

    def __init__(self) -> None:
        self._encoded = bytearray(b'"')

    def append(self, text: str) -> None:
        """Encode further text."""
        self._encoded += msgspec.json.encode(text)[1:-1]

    def value(self) -> msgspec.Raw:
        """Return the whole of it, for msgspec to put into another value."""
        return msgspec.Raw(bytes(self._encoded) + b'"')
