"""Free lists to build a cache with, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np

from cache.pages import Extents, PageAllocator
from cache.types import NULL_PAGE, Pages

Allocation = Literal["extent", "lifo"]


class Stack(Extents):
    """Hand out the page freed last first, which aliases as much as possible."""

    def __init__(self, num_pages: int) -> None:
        self._stack = list(range(num_pages - 1, NULL_PAGE, -1))

    def take(self, num_pages: int, after: int | None) -> list[int]:
        """See `Extents.take`."""
        del after
        return [self._stack.pop() for _ in range(num_pages)]

    def put_back(self, pages: list[int]) -> None:
        """See `Extents.put_back`."""
        self._stack += pages

    def runs(self) -> tuple[Pages, Pages]:
        """See `Extents.runs`."""
        starts = np.array(self._stack, np.int32)
        return starts, np.ones_like(starts)


FREE_LISTS: Final[Mapping[Allocation, type[Extents]]] = {"extent": Extents, "lifo": Stack}


def free_pages(allocator: PageAllocator) -> Pages:
    """Return every free page as the free list has them, int32 [n], ascending."""
    _, num_listed = allocator.count_free_pages()
    return np.repeat(np.arange(len(num_listed), dtype=np.int32), num_listed)
