"""`CutOff`: what was cut off a history since its last turn, as its log tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from session_server.sessions.store.records import LogEntry


class CutOff:
    """Follow the entries of a log, in order. A turn tells the engine what was cut off before it,
    and the engine drops the KV of that; where it has ended before the next turn, the log alone has
    these tokens. `tokens`: all there were before the first cut; `num_kept`: those that are left of
    them."""

    __slots__ = ("num_kept", "tokens")

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()
        self.num_kept = 0

    def follow(self, entry: LogEntry, num_tokens: int, tokens: Callable[[], Sequence[int]]) -> None:
        """Note an entry before it changes a history of so many `tokens`."""
        num_kept = entry.change.num_kept
        if entry.turns:
            self.tokens = ()
        elif num_kept < num_tokens:
            if not self.tokens:
                self.tokens, self.num_kept = tokens(), num_kept
            self.num_kept = min(self.num_kept, num_kept)
