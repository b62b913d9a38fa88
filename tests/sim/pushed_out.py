"""Whether an engine that ends makes room by giving up what it has just written."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from session_server.core.tier_orders import TierResult, WriteFile


class Removed(Protocol):
    """A file: its size, and when it was used last."""

    num_bytes: int
    used_ns: int


@dataclass(slots=True)
class PushedOut:
    """Knows which files an engine has removed since its last order. `num_in_vain`: how often to
    make room for one that was used longer ago."""

    num_in_vain: int = 0
    removed: list[Removed] = field(default_factory=list)
    writing: WriteFile | None = None
    unwanted: set[bytes] = field(default_factory=set)
    """Files whose segments were dropped while they were written: nobody goes on from them."""

    def begin(self, order: WriteFile, there: Iterable[Removed], max_bytes: int) -> None:
        """A file is to be written beside those that are there. Without the room of one that was
        removed and used later there was none for it; a file may also be removed because nobody goes
        on from it."""
        if any(each.used_ns > order.used_ns for each in self.removed):
            num_bytes = sum(each.num_bytes for each in (*there, *self.removed))
            self.num_in_vain += num_bytes + order.num_bytes > max_bytes
        self.writing = order
        self.unwanted.discard(order.found.file.file_id)

    def end(self, results: Iterable[TierResult]) -> None:
        """The engine takes these."""
        if self.writing is not None and self.writing.number in {each.number for each in results}:
            self.writing = None

    def drop(self, segments: Collection[int]) -> None:
        """Segments are dropped, maybe that which is written."""
        if self.writing is not None and self.writing.segment in segments:
            self.unwanted.add(self.writing.found.file.file_id)

    def remove(self, file_id: bytes, file: Removed) -> None:
        """A file is removed that was written as the engine ended."""
        if file_id not in self.unwanted:
            self.removed.append(file)
