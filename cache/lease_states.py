"""`LeaseStates`: hold the recurrent states of one lease that are not snapshots in the tree.

Every forward reads the state at its start and writes new pages, so no state is overwritten while it
may be read again. docs/memory.md lists which states a lent and a parked lease keep.
"""

from __future__ import annotations

from cache.stores import KVStores
from cache.types import NULL_PAGE, Holder


class LeaseStates:
    """Hold private pages of the recurrent pool by the length whose state they are; empty without
    such a pool."""

    __slots__ = ("_pages", "_rollback_states", "_stores", "pool")

    def __init__(self, stores: KVStores) -> None:
        self._stores = stores
        self.pool = stores.recurrent.pool if stores.recurrent is not None else None
        self._pages: dict[int, int] = {}
        self._rollback_states: dict[int, int] = {}

    @property
    def pages(self) -> tuple[int, ...]:
        """Return the pages in no order, including the one kept for a rollback."""
        return (*self._pages.values(), *self._rollback_states.values())

    @property
    def lengths(self) -> list[int]:
        """Return the lengths whose states are held, ascending."""
        return sorted(self._pages)

    def num_missing(self, computed_len: int, to_len: int, num_drafts: int) -> int:
        """Return the number of pages that `allocate` would take."""
        left = self._written_lengths(computed_len, to_len, num_drafts)
        return sum(length not in self._pages for length in left)

    def allocate(self, computed_len: int, to_len: int, num_drafts: int, holder: Holder) -> None:
        """Allocate pages for the states that a forward ending at `to_len`, drafts included, writes.

        Forwards are launched in order, so states past `to_len` belong to one that failed or whose
        drafts were rejected: they are freed.
        """
        if self.pool is None:
            return
        self.drop_beyond(to_len, holder)
        left = self._written_lengths(computed_len, to_len, num_drafts)
        wanted = [length for length in left if length not in self._pages]
        allocated = self._stores.allocators[self.pool].acquire(len(wanted), holder)
        self._pages.update(zip(wanted, allocated, strict=True))

    def page_at(self, length: int) -> int:
        """Return the page with the state after `length` tokens, `NULL_PAGE` if there is none."""
        return self._pages.get(length, NULL_PAGE)

    def targets(self, start: int, end: int, num_drafts: int) -> tuple[tuple[int, int], ...]:
        """Return (length, page) of the states that a forward over [start, end) writes."""
        lengths = self._written_lengths(start, end, num_drafts)
        return tuple((length, self._pages[length]) for length in lengths)

    def longest_len(self, length: int) -> int:
        """Return the longest length <= `length` whose state is held; 0 without any."""
        return max((n for n in self._pages if n <= length), default=0)

    def release_superseded(self, computed_len: int, mark_len: int, holder: Holder) -> None:
        """Free the computed states that neither a rollback, a relaunch nor `publish` reads."""
        if not self._pages:
            return
        kept = (mark_len, computed_len - computed_len % self._stores.page_size, computed_len)
        self._drop([n for n in self._pages if n <= computed_len and n not in kept], holder)

    def drop_beyond(self, length: int, holder: Holder) -> None:
        """Free the states of all lengths greater than `length`."""
        self._drop([n for n in self._pages if n > length], holder)

    def keep_only(self, length: int, holder: Holder) -> None:
        """Free the states of all lengths but `length`."""
        self._drop([n for n in self._pages if n != length], holder)

    def keep_for_rollback(self, length: int) -> None:
        """Keep the state at `length`, if there is one, out of reach of forwards."""
        if length in self._pages:
            self._rollback_states[length] = self._pages.pop(length)

    def restore_rollback_state(self) -> None:
        """Use the state kept for a rollback like any other again."""
        self._pages.update(self._rollback_states)
        self._rollback_states.clear()

    def release_rollback_state(self, holder: Holder) -> None:
        """Free the state kept for a rollback."""
        if self._rollback_states and self.pool is not None:
            self._stores.allocators[self.pool].release(self._rollback_states.values(), holder)
            self._rollback_states.clear()

    def transfer(self, source: Holder, target: Holder) -> None:
        """Book all states from one account to another."""
        if self.pool is not None:
            self._stores.ledgers[self.pool].transfer(len(self.pages), source, target)

    def quarantine(self, holder: Holder) -> None:
        """Move all states to quarantine."""
        if self.pool is not None:
            self.transfer(holder, Holder.QUARANTINE)
            self._stores.quarantined[self.pool].extend(self.pages)
            self._pages.clear()
            self._rollback_states.clear()

    def take_snapshots(self, start: int, num_pages: int) -> list[int]:
        """Remove and return the states at the ends of the pages [start, start + num_pages),
        `NULL_PAGE` where there is none.
        """
        page_size = self._stores.page_size
        ends = range((start + 1) * page_size, (start + num_pages + 1) * page_size, page_size)
        return [self._pages.pop(end, NULL_PAGE) for end in ends]

    def put_snapshots_back(self, start: int, pages: list[int]) -> None:
        """Undo `take_snapshots`."""
        for index, page in enumerate(pages, start + 1):
            if page != NULL_PAGE:
                self._pages[index * self._stores.page_size] = page

    def _written_lengths(self, computed_len: int, to_len: int, num_drafts: int) -> tuple[int, ...]:
        """Return the lengths whose states a forward over [computed_len, to_len) writes."""
        certain_len = to_len - num_drafts
        last_whole = certain_len - certain_len % self._stores.page_size
        # The last page boundary inside the forward: the next `publish` makes it a snapshot.
        on_the_way = (last_whole,) if computed_len < last_whole < certain_len else ()
        return (*on_the_way, *range(certain_len, to_len + 1))

    def _drop(self, lengths: list[int], holder: Holder) -> None:
        if lengths and self.pool is not None:
            pages = [self._pages.pop(length) for length in lengths]
            self._stores.allocators[self.pool].release(pages, holder)
