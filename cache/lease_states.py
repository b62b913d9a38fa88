"""`LeaseStates`: the recurrent states that one lease holds beside the snapshots in the tree.

A state is what all tokens before it have come to, and no forward can undo a token. So nothing is
overwritten while it may be wanted: every forward reads the state at its beginning and writes a page
of its own for the state at its end. What a lent lease keeps of those is

* the state at its mark, to which a rollback leads,
* the state at its computed length, from which a forward that failed is launched again,
* the state at the last whole page, which becomes a snapshot when the pages are published,
* and the states that forwards in flight will leave: where guesses are verified, one after each of
  them, since only the right ones count in the end. What wrong ones left is overwritten or goes.

A parked lease keeps the one at its computed length. So the memory of a session does not depend on
how long it is.
"""

from __future__ import annotations

from cache.stores import KVStores
from cache.types import NULL_PAGE, Holder


class LeaseStates:
    """Pages of the recurrent pool by the length whose state they hold; none without such a pool."""

    __slots__ = ("_pages", "_rollback_states", "_stores", "pool")

    def __init__(self, stores: KVStores) -> None:
        self._stores = stores
        self.pool = stores.recurrent.pool if stores.recurrent is not None else None
        self._pages: dict[int, int] = {}
        self._rollback_states: dict[int, int] = {}

    @property
    def pages(self) -> tuple[int, ...]:
        """Return the pages, in no order, the one that is set aside included."""
        return (*self._pages.values(), *self._rollback_states.values())

    @property
    def lengths(self) -> list[int]:
        """Tokens that the states stand for, ascending."""
        return sorted(self._pages)

    def num_missing(self, computed_len: int, to_len: int, num_drafts: int) -> int:
        """Pages that `allocate` would take."""
        left = self._written_lengths(computed_len, to_len, num_drafts)
        return sum(length not in self._pages for length in left)

    def allocate(self, computed_len: int, to_len: int, num_drafts: int, holder: Holder) -> None:
        """Pages for what a forward that ends at `to_len`, guesses included, leaves. Forwards come
        in order, so what was meant for one that went further is given back: it has failed, or its
        guesses were wrong.
        """
        if self.pool is None:
            return
        self.drop_beyond(to_len, holder)
        left = self._written_lengths(computed_len, to_len, num_drafts)
        wanted = [length for length in left if length not in self._pages]
        allocated = self._stores.allocators[self.pool].acquire(len(wanted), holder)
        self._pages.update(zip(wanted, allocated, strict=True))

    def page_at(self, length: int) -> int:
        """The page with the state at that length, `NULL_PAGE` where there is none."""
        return self._pages.get(length, NULL_PAGE)

    def targets(self, start: int, end: int, num_drafts: int) -> tuple[tuple[int, int], ...]:
        """Lengths, and pages for their states, that a forward over [start, end) leaves."""
        lengths = self._written_lengths(start, end, num_drafts)
        return tuple((length, self._pages[length]) for length in lengths)

    def longest_len(self, length: int) -> int:
        """The longest length <= `length` that there is a state of; 0 without any."""
        return max((n for n in self._pages if n <= length), default=0)

    def release_superseded(self, computed_len: int, mark_len: int, holder: Holder) -> None:
        """Give back what is computed and that nobody will ask for."""
        if not self._pages:
            return
        kept = (mark_len, computed_len - computed_len % self._stores.page_size, computed_len)
        self._drop([n for n in self._pages if n <= computed_len and n not in kept], holder)

    def drop_beyond(self, length: int, holder: Holder) -> None:
        """Give back the states of all longer lengths."""
        self._drop([n for n in self._pages if n > length], holder)

    def keep_only(self, length: int, holder: Holder) -> None:
        """Give back the states of all other lengths."""
        self._drop([n for n in self._pages if n != length], holder)

    def keep_for_rollback(self, length: int) -> None:
        """Keep the state at that length, if there is one, where no forward writes or reads it."""
        if length in self._pages:
            self._rollback_states[length] = self._pages.pop(length)

    def restore_rollback_state(self) -> None:
        """Hold the state that was set aside like any other again."""
        self._pages.update(self._rollback_states)
        self._rollback_states.clear()

    def release_rollback_state(self, holder: Holder) -> None:
        """Give back the state that was set aside."""
        if self._rollback_states and self.pool is not None:
            self._stores.allocators[self.pool].release(self._rollback_states.values(), holder)
            self._rollback_states.clear()

    def transfer(self, source: Holder, target: Holder) -> None:
        """Move all from one account to another."""
        if self.pool is not None:
            self._stores.ledgers[self.pool].transfer(len(self.pages), source, target)

    def quarantine(self, holder: Holder) -> None:
        """Move all to quarantine."""
        if self.pool is not None:
            self.transfer(holder, Holder.QUARANTINE)
            self._stores.quarantined[self.pool].extend(self.pages)
            self._pages.clear()
            self._rollback_states.clear()

    def take_snapshots(self, start: int, num_pages: int) -> list[int]:
        """Hand over the states at the ends of the whole pages from page `start` on, `NULL_PAGE`
        where there is none.
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
        """Lengths whose states a forward that ends at `to_len` leaves, if no other one did."""
        certain_len = to_len - num_drafts
        last_whole = certain_len - certain_len % self._stores.page_size
        on_the_way = (last_whole,) if computed_len < last_whole < certain_len else ()
        return (*on_the_way, *range(certain_len, to_len + 1))

    def _drop(self, lengths: list[int], holder: Holder) -> None:
        if lengths and self.pool is not None:
            pages = [self._pages.pop(length) for length in lengths]
            self._stores.allocators[self.pool].release(pages, holder)
