"""What each kind of layer keeps of the past, and so where a forward can go on from.

A pool's pages of one session are entries of its row: a page id, or `NULL_PAGE` for a page that was
let go because nothing will read it again. The tree keeps the same entries on its edges. One
question decides matches, rewinds and releases alike, and every component answers it: from which
position on does a forward at this length still read? What lies before may be gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cache.spec import STATES_PER_ROW, CacheSpec, LayerGroup, LayerKind
from cache.types import NULL_PAGE, Pages, PoolName, pages_for

_FIRST_BLOCK: Final = 256
"""Entries that the search for a snapshot reads first."""


class Component(Protocol):
    """Rules of the layers that share one pool. Lengths are tokens; all methods are pure."""

    @property
    def pool(self) -> PoolName:
        """The pool whose pages it rules."""
        ...

    @property
    def is_bounded(self) -> bool:
        """Whether there are pages that nothing reads again, however the session goes on."""
        ...

    def first_page(self, length: int) -> int:
        """The first page that a query at position `length` reads."""
        ...

    def parked_pages(self, num_pages: int) -> int:
        """The most pages that a parked session holds whose row has `num_pages`."""
        ...

    def running_pages(self, num_pages: int, num_ahead: int) -> int:
        """The most pages that a turn holds at a time beyond what its session held before it.

        Args:
            num_pages: how many it adds to its row altogether.
            num_ahead: positions that may be launched and not settled, on which it may come back.
        """
        ...

    def continuable_len(self, entries: Pages, length: int, *, first: int = 0) -> int:
        """The longest length <= `length` that a forward can go on from.

        Args:
            entries: pages from index `first` on, int32 [n]; they reach up to `length`.
            length: tokens whose content is valid where there is a page.
            first: index of the first entry; pages before it are gone.
        """
        ...


class _Rules:
    """What all kinds know: `pool`, whose pages they rule, and how many positions a page has."""

    __slots__ = ("_page_size", "pool")

    def __init__(self, group: LayerGroup, page_size: int) -> None:
        self.pool: PoolName = group.pool
        self._page_size = page_size


class FullAttention(_Rules):
    """Every position on its own: kept, reused and cut back to any length.

    That is K and V of full attention (Vaswani et al. 2017), and the latents of MLA (DeepSeek-AI
    2024), which K and V are made from.
    """

    __slots__ = ()

    @property
    def is_bounded(self) -> bool:
        """Nothing: every position is read by all that follow."""
        return False

    def first_page(self, length: int) -> int:
        """The first of all."""
        del length
        return 0

    def parked_pages(self, num_pages: int) -> int:
        """All of them."""
        return num_pages

    def running_pages(self, num_pages: int, num_ahead: int) -> int:
        """All of them."""
        del num_ahead
        return num_pages

    def continuable_len(self, entries: Pages, length: int, *, first: int = 0) -> int:
        """All of it: no page goes before the ones behind it."""
        del entries, first
        return length


class SlidingWindow(_Rules):
    """K and V of the last `window` positions (Beltagy et al. 2020): a query sees itself and the
    `window - 1` positions before it.
    """

    __slots__ = ("_window",)

    def __init__(self, group: LayerGroup, page_size: int) -> None:
        assert group.window > 0, "a window sees at least its own position"
        super().__init__(group, page_size)
        self._window = group.window

    @property
    def is_bounded(self) -> bool:
        """Whatever the window has passed."""
        return True

    def first_page(self, length: int) -> int:
        """The page of position `length - window + 1`."""
        return max(0, length - self._window + 1) // self._page_size

    def parked_pages(self, num_pages: int) -> int:
        """The window before the last whole page, and the page that is begun."""
        return min(num_pages, pages_for(self._window - 1, self._page_size) + 1)

    def running_pages(self, num_pages: int, num_ahead: int) -> int:
        """The window at the end of its prompt, which is published, the window that is read, and
        what is computed ahead of it."""
        window = pages_for(self._window - 1, self._page_size)
        return min(num_pages, 2 * window + pages_for(num_ahead, self._page_size) + 1)

    def continuable_len(self, entries: Pages, length: int, *, first: int = 0) -> int:
        """Where the whole window before it is there.

        A hole hides every length whose window it is in. The next candidate ends with the last page
        that is there before the hole: holes may be as long as the history.
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


class RecurrentState(_Rules):
    """A summary of all positions, of fixed size: short convolutions, state space models (Dao and Gu
    2024), gated delta rules (Yang et al. 2025).

    Entry i of a session's row, and of an edge, is the state after the whole page i, where one was
    kept: a snapshot. States at other lengths are a lease's own, see `cache.lease_states`.
    """

    __slots__ = ()

    def __init__(self, group: LayerGroup, page_size: int) -> None:
        assert group.state_shapes, "a state has parts"
        super().__init__(group, page_size)

    @property
    def is_bounded(self) -> bool:
        """All states but the last: each is made from the one before it."""
        return True

    def first_page(self, length: int) -> int:
        """The page of the last position before `length`, whose state is all that is read."""
        return max(0, pages_for(length, self._page_size) - 1)

    def parked_pages(self, num_pages: int) -> int:
        """The state at its length, and the snapshot at what it has published."""
        return min(num_pages, 2)

    def running_pages(self, num_pages: int, num_ahead: int) -> int:
        """As many as a row comes with."""
        del num_pages, num_ahead
        return STATES_PER_ROW

    def continuable_len(self, entries: Pages, length: int, *, first: int = 0) -> int:
        """The end of the last whole page that has a snapshot."""
        kept = _last_kept(entries[: max(0, length // self._page_size - first)])
        return (first + int(kept[-1]) + 1) * self._page_size if len(kept) else 0


def _last_kept(entries: Pages) -> NDArray[np.intp]:
    """Return indices of pages that are there, ascending, the last of all among them; none if there
    is none.

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
    """Pages of its pool that a parked session of `length` tokens holds, shared ones included.

    They begin with what a forward at the last whole page reads: others can go on from there.
    """
    whole = length - length % page_size
    return pages_for(length, page_size) - component.first_page(whole)


def components_of(spec: CacheSpec) -> tuple[Component, ...]:
    """One component per pool, in the order of the spec's groups."""
    groups: dict[PoolName, LayerGroup] = {}
    for group in spec.groups:
        first = groups.setdefault(group.pool, group)
        if (first.kind, first.window) != (group.kind, group.window):
            raise ValueError(f"pool {group.pool} is shared by layers of different kinds")
    return tuple(_RULES[group.kind](group, spec.page_size) for group in groups.values())


_Kind = type[FullAttention] | type[SlidingWindow] | type[RecurrentState]

_RULES: Final[Mapping[LayerKind, _Kind]] = MappingProxyType(
    {
        LayerKind.FULL: FullAttention,
        LayerKind.WINDOW: SlidingWindow,
        LayerKind.LATENT: FullAttention,
        LayerKind.RECURRENT: RecurrentState,
    }
)
