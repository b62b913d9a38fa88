"""`CutOff`: what was cut off a history since its last turn, as its log tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from session_server.sessions.store.records import LogEntry

Tokens = Callable[[int, int], Sequence[int]]
"""Return the token ids of positions [start, end)."""


class CutOff:
    """Follow the entries of a log, in order. A turn tells the engine what was cut off before it,
    and the engine drops the KV of that; where it has ended before the next turn, the log alone has
    these tokens. `num_kept`: those of the history that are left in front of them."""

    __slots__ = ("_parts", "num_kept")

    def __init__(self) -> None:
        self._parts: list[Sequence[int]] = []
        """What was cut off, the last of it first."""

        self.num_kept = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def follow(self, entry: LogEntry, num_tokens: int, tokens: Tokens) -> None:
        """Note an entry before it changes a history of so many `tokens`. O(tokens it cuts off)."""
        num_kept = entry.change.num_kept
        end = self.num_kept if self._parts else num_tokens
        if entry.turns:
            self._parts.clear()
        elif num_kept < end:
            self._parts.append(tokens(num_kept, end))
            self.num_kept = num_kept

    def whole(self, tokens: Tokens) -> list[int]:
        """Return the history as it was before the first cut; `tokens` has it as it is now."""
        return [*chain(tokens(0, self.num_kept), *reversed(self._parts))]
