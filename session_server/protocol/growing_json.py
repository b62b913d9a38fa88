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


class _Growing:
    """Build one JSON value between `_BRACKETS`."""

    _BRACKETS = (b"[", b"]")

    def __init__(self) -> None:
        self._encoded = bytearray(self._BRACKETS[0])

    def __len__(self) -> int:
        """Return the number of bytes encoded."""
        return len(self._encoded)

    def value(self) -> msgspec.Raw:
        """Return the whole value, for msgspec to embed in another one."""
        return msgspec.Raw(b"".join((self._encoded, self._BRACKETS[1])))


class GrowingArray(_Growing):
    """Build a JSON array."""

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


class GrowingString(_Growing):
    """Build a JSON string."""

    _BRACKETS = (b'"', b'"')

    def append(self, text: str) -> None:
        """Encode and append more text."""
        self._encoded += msgspec.json.encode(text)[1:-1]
