"""Build JSON values that grow: each part is encoded once, however often the whole is sent.

Long values are encoded in slices; the caller may let other work run between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

SLICE_LENGTH: Final = 64
"""Entries encoded in one go. With twenty alternatives a token's scores take about 10 µs, with their
texts 100."""


class GrowingArray:
    """Build a JSON array."""

    def __init__(self) -> None:
        self._encoded = bytearray(b"[")

    def extend(self, values: Sequence[Any]) -> None:
        """Encode and append more values."""
        if values:
            if len(self._encoded) > 1:
                self._encoded += b","
            self._encoded += msgspec.json.encode(values)[1:-1]

    def extend_in_slices(
        self, values: Sequence[Any], body_of: Callable[[Any], Any] = lambda value: value
    ) -> Iterator[None]:
        """Encode and append more values, converted by `body_of`, a slice per step."""
        for start in range(0, len(values), SLICE_LENGTH):
            if start:
                yield
            self.extend([body_of(value) for value in values[start : start + SLICE_LENGTH]])

    def value(self) -> msgspec.Raw:
        """Return the whole array, for msgspec to embed in another value."""
        return msgspec.Raw(b"".join((self._encoded, b"]")))


class GrowingString:
    """Build a JSON string."""

    def __init__(self) -> None:
        self._encoded = bytearray(b'"')

    def append(self, text: str) -> None:
        """Encode and append more text."""
        self._encoded += msgspec.json.encode(text)[1:-1]

    def value(self) -> msgspec.Raw:
        """Return the whole string, for msgspec to embed in another value."""
        return msgspec.Raw(b"".join((self._encoded, b'"')))
