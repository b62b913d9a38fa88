"""Find stop strings in text that arrives in pieces of any size.

The result does not depend on how the text was split: the match is the stop string that is *complete
first*, and the longest one if several are complete at the same character.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Find stop strings, and hold back only text that may still become one.

    `keep_stop`: whether the emitted text includes the stop string. After a match the matcher emits
    nothing more. `matched`: the stop string found, None while there is none.
    """

    def __init__(self, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Add text; return what certainly is not part of a stop string."""
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = self._first_complete(buffer)
        if found is None:
            start = len(buffer) - self._num_held(buffer)
            self._held = buffer[start:]
            return buffer[:start]
        end, stop = found
        self.matched = stop
        self._held = ""
        return buffer[:end] if self._keep_stop else buffer[: end - len(stop)]

    def flush(self) -> str:
        """Return the text held back, when the answer has ended."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, buffer: str) -> tuple[int, str] | None:
        found = [
            (buffer.index(stop) + len(stop), -len(stop), stop)
            for stop in self._stops
            if stop in buffer
        ]
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop

    def _num_held(self, buffer: str) -> int:
        """Return the length of the longest suffix of `buffer` that begins a stop string."""
        return max(_overlap(buffer, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
