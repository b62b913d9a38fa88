"""`Component`: say, per kind of layer, which pages of a session a forward still reads.

Per pool, the entries of a session's row are page ids, or `NULL_PAGE` for a page that was freed
because no forward will read it again. The tree stores the same entries on its edges. Matches,
rewinds and releases all ask the component: which is the first position that a forward at this
length reads? Pages before it may be missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from cache.spec import STATES_PER_ROW, CacheSpec, LayerGroup, LayerKind
from cache.types import NULL_PAGE, Pages, PoolName, pages_for

_FIRST_BLOCK: Final = 256
"""Entries in the first block that the search for a snapshot reads."""


class Component(ABC):
    """Answer for the layers that share one pool. Lengths are tokens; all methods are pure.

    `is_bounded`: whether the pages that forwards read do not grow with the history.
    """

    is_bounded: ClassVar[bool] = True

    def __init__(self, group: LayerGroup, page_size: int) -> None:
        self.pool: PoolName = group.pool
        self._page_size = page_size

    @abstractmethod
    def first_page(self, length: int) -> int:
        """Return the index of the first page that a query at position `length` reads."""

    @abstractmethod
    def parked_pages(self, num_pages: int) -> int:
        """Return the most pages that a parked session with a row of `num_pages` holds."""

    @abstractmethod
    def running_pages(self, num_pages: int, num_ahead: int) -> int:
        """Return the most pages that a turn holds at a time beyond those its session held before.

        `num_pages`: pages that the turn adds to its row altogether. `num_ahead`: positions that may
        be launched and not settled, and so may be rolled back.
        """

    @abstractmethod
    def continuable_len(self, entries: Pages, length: int, *, first: int = 0) -> int:
        """Return the longest length <= `length` that a forward can continue from.

        `entries`: int32 [n], page ids from index `first` on, up to `length`; all pages before them
        are missing.
        """


class FullAttention(Component):
    """Rule pools that keep every position: K and V of full attention (Vaswani et al. 2017), and the
    latents of MLA (DeepSeek-AI 2024). KV can be cut back to any length.
    """

    is_bounded = False

    def first_page(self, length: int) -> int:
        """Return 0: every page is read."""
        return 0

    def parked_pages(self, num_pages: int) -> int:
        """Return `num_pages`: all are kept."""
        return num_pages

    def running_pages(self, num_pages: int, num_ahead: int) -> int:
        """Return `num_pages`: all are kept."""
        return num_pages

    def continuable_len(self, entries: Pages, length: int, *, first: int = 0) -> int:
        """Return `length`: no page is missing before it."""
        return length


class SlidingWindow(Component):
    """Rule pools of sliding-window attention (Beltagy et al. 2020): a query reads its own position
    and the `window - 1` positions before it.
    """

    def __init__(self, group: LayerGroup, page_size: int) -> None:
        assert group.window > 0, "a window sees at least its own position"
        super().__init__(group, page_size)
        self._window = group.window

    def first_page(self, length: int) -> int:
        """Return the page of position `length - window + 1`."""
        return max(0, length - self._window + 1) // self._page_size

    def parked_pages(self, num_pages: int) -> int:
        """Return the window before the last whole page, plus the partial page."""
        return min(num_pages, pages_for(self._window - 1, self._page_size) + 1)

    def running_pages(self, num_pages: int, num_ahead: int) -> int:
        """Return the pages of the window at the end of the prompt, which is published, of the
        window that is read, and of the positions computed ahead of it."""
        window = pages_for(self._window - 1, self._page_size)
        return min(num_pages, 2 * window + pages_for(num_ahead, self._page_size) + 1)

    def continuable_len(self, entries: Pages, length: int, *, first: int = 0) -> int:
        """Return the longest length whose whole window is there.

        A missing page excludes every length whose window includes it. The next candidate ends with
        the last page before the gap, because a gap may be as long as the history.
        """
        while length > 0:
            start, end = self.first_page(length), pages_for(length, self._page_size)
            seen = entries[max(0, start - first) : end - first]
            if np.count_nonzero(seen) == len(seen):
                return length if start >= first else 0
            last_hole = int((seen == NULL_PAGE).nonzero()[0][-1])
            kept = _last_kept(entries[: max(0, start - first) + last_hole])
            length = (first + int(kept[-1]) + 1) * self._page_size if len(kept) else 0
        return 0


class RecurrentState(Component):
    """Rule the pool of recurrent states of fixed size: short convolutions, state space models (Dao
    and Gu 2024), gated delta rules (Yang et al. 2025).

    Entry i of a row, and of an edge, is a snapshot: the state after page i, if it was kept. States
    at other lengths are private to a lease, see `cache.lease_states`.
    """

    def __init__(self, group: LayerGroup, page_size: int) -> None:
        assert group.state_shapes, "a state has parts"
        super().__init__(group, page_size)

    def first_page(self, length: int) -> int:
        """Return the page of the last position before `length`: only its state is read."""
        return max(0, pages_for(length, self._page_size) - 1)

    def parked_pages(self, num_pages: int) -> int:
        """Return at most 2: the state at its length and the snapshot at its published length."""
        return min(num_pages, 2)

    def running_pages(self, num_pages: int, num_ahead: int) -> int:
        """Return `STATES_PER_ROW`: every row comes with so many."""
        return STATES_PER_ROW

    def continuable_len(self, entries: Pages, length: int, *, first: int = 0) -> int:
        """Return the end of the last whole page that has a snapshot."""
        kept = _last_kept(entries[: max(0, length // self._page_size - first)])
        return (first + int(kept[-1]) + 1) * self._page_size if len(kept) else 0


def _last_kept(entries: Pages) -> NDArray[np.intp]:
    """Return indices of pages that are not `NULL_PAGE`, ascending, including the last such page;
    empty if there is none.

    Searches blocks from the end: a lease keeps two or three snapshots near its end, so what this
    costs does not grow with the history.
    """
    end, num_entries = len(entries), _FIRST_BLOCK
    while end > 0:
        start = max(0, end - num_entries)
        kept: NDArray[np.intp] = entries[start:end].nonzero()[0]
        if len(kept):
            return kept + start
        end, num_entries = start, 4 * num_entries
    return np.empty(0, np.intp)


def pages_at_rest(component: Component, length: int, page_size: int) -> int:
    """Return the pages that a parked session of `length` tokens holds, including shared ones.

    They begin with what a forward at the last whole page reads, because that is published.
    """
    whole = length - length % page_size
    return pages_for(length, page_size) - component.first_page(whole)


def components_of(spec: CacheSpec) -> tuple[Component, ...]:
    """Return one component per pool, in the order of the spec's groups.

    Raises:
        ValueError: layers of different kinds share a pool.
    """
    groups: dict[PoolName, LayerGroup] = {}
    for group in spec.groups:
        first = groups.setdefault(group.pool, group)
        if (first.kind, first.window) != (group.kind, group.window):
            raise ValueError(f"pool {group.pool} is shared by layers of different kinds")
    return tuple(_RULES[group.kind](group, spec.page_size) for group in groups.values())


_RULES: Final[Mapping[LayerKind, type[Component]]] = {
    LayerKind.FULL: FullAttention,
    LayerKind.WINDOW: SlidingWindow,
    LayerKind.LATENT: FullAttention,
    LayerKind.RECURRENT: RecurrentState,
}
