"""`Transit`: pages on their way out of the pools, or back into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from cache.components import Component
from cache.radix_node import LockReceipt
from cache.types import Pages, PoolName, SessionId, Tokens

TransitId = NewType("TransitId", int)
"""Number of a copy, counted from 1 per cache."""


@dataclass(frozen=True, slots=True)
class PageRange:
    """Name pages of one pool by their place on a path: entry i is page `first` + i of the path.

    `pages`: int32 [n].
    """

    first: int
    pages: Pages

    @property
    def end(self) -> int:
        """Return the index behind the last page."""
        return self.first + len(self.pages)


@dataclass(slots=True, eq=False)
class Transit:
    """Describe pages on their way: those that hold [start, end) of a path, whole pages.

    `pages`: per pool, those that are copied; a bounded pool has only what a forward at `end` reads.
    `receipt`: locks what lies before them, and on the way out also themselves. `tokens`: int32
    [end - start] on the way in, None on the way out.
    """

    number: TransitId
    receipt: LockReceipt
    start: int
    end: int
    pages: Mapping[PoolName, PageRange]
    tokens: Tokens | None = None

    @property
    def name(self) -> SessionId:
        """Return the name under which recounts visit it."""
        return SessionId(f"transit {self.number}")

    @property
    def is_incoming(self) -> bool:
        """Return whether the pages are being written."""
        return self.tokens is not None

    def locked_span(self, component: Component, page_size: int) -> tuple[int, int]:
        """Return the range of pages that its receipt has locked in a bounded pool."""
        length = self.receipt.length
        return component.first_page(length), length // page_size
