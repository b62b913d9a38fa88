"""Bound the journals of all sessions together, in bytes and age. The oldest entries go first.

A queue holds the journal and the sequence number of every entry, in the order they were written.
Its first element is the oldest entry of all. If that journal is gone or has dropped the entry
itself, the element is void and skipped. Dropping an entry therefore costs O(1), however many
sessions there are. A sweep removes void elements once they outnumber the others, a few with each
entry that is written: the elements that it has passed stand in a queue of their own, in front.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Protocol
from weakref import ref

OVERSIZE_GRACE_S: Final = 10.0
"""How long an entry larger than its journal's bound is kept for those who read now."""

ENTRIES_PER_SLICE: Final = 64
"""Entries dropped at a time: about a tenth of a millisecond."""

SWEPT_PER_ENTRY: Final = 16
"""Elements that a sweep looks at with each entry that is written: a few microseconds."""

_MIN_SWEEP: Final = 1024


class BoundedLog(Protocol):
    """Name what `Replay` asks of a `Journal`."""

    @property
    def first_seq(self) -> int:
        """Return the sequence number of the oldest entry kept."""

    @property
    def oldest_s(self) -> float | None:
        """Return when the oldest entry was written that may be dropped, if there is one."""

    def drop_oldest(self) -> None:
        """Drop the oldest entry."""

    def trim(self, now_s: float) -> None:
        """Drop what exceeds its own bound."""


class _Elements:
    """Queue the journal and the sequence number of entries.

    Two queues and not one of pairs: an element takes 16 bytes instead of 80.
    """

    def __init__(self) -> None:
        self.journals: deque[ref[BoundedLog]] = deque()
        self.seqs: deque[int] = deque()

    def push(self, journal: ref[BoundedLog], seq: int) -> None:
        self.journals.append(journal)
        self.seqs.append(seq)

    def pop(self) -> tuple[ref[BoundedLog], int]:
        return self.journals.popleft(), self.seqs.popleft()


class Replay:
    """Bound the journals of all sessions. They are referenced weakly: one without readers is
    freed."""

    def __init__(self, *, max_bytes: int, max_age_s: float) -> None:
        self.max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._num_bytes = 0
        self._num_entries = 0
        self._swept = _Elements()
        self._rest = _Elements()
        self._is_sweeping = False
        self._oversize: deque[tuple[float, ref[BoundedLog]]] = deque()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all journals."""
        return self._num_bytes

    def add(self, journal: BoundedLog, seq: int, num_bytes: int) -> None:
        """Count entry `seq` that `journal` has just written, and drop old entries to make room for
        it.

        Every other entry may be dropped for it; it stays. One that needs the room of many gets it
        a slice at a time, here and in `drop_old`: until then the bound is exceeded, by no more
        than was written since the last call of that.
        """
        self._num_bytes += num_bytes
        self._num_entries += 1
        self._rest.push(ref(journal), seq)
        for _ in range(ENTRIES_PER_SLICE):
            if not self._is_over:
                break
            self._drop_first(self._first())
        if self._is_sweeping or self._num_elements > 2 * self._num_entries + _MIN_SWEEP:
            self._sweep()

    def remove(self, num_bytes: int, num_entries: int = 1) -> None:
        """Stop counting entries that a journal has dropped, or that are freed with it."""
        self._num_bytes -= num_bytes
        self._num_entries -= num_entries

    def trim_later(self, journal: BoundedLog, due_s: float | None = None) -> None:
        """Schedule the trim of a journal that exceeds its own bound; None: in the next slice."""
        if due_s is None:
            self._oversize.appendleft((-math.inf, ref(journal)))
        else:
            self._oversize.append((due_s, ref(journal)))

    def drop_old(self, now_s: float) -> bool:
        """Drop a slice of what is too old or exceeds a bound; look only at what is due.

        Returns:
            Whether there may be more than is dropped at a time.
        """
        if self._oversize and self._oversize[0][0] <= now_s:
            journal = self._oversize.popleft()[1]()
            if journal is not None:
                journal.trim(now_s)
            return True
        for _ in range(ENTRIES_PER_SLICE):
            if not self._num_elements:
                return False
            first = self._first()
            if first is not None and not self._is_over:
                assert first.oldest_s is not None, "the first element is not void"
                if now_s - first.oldest_s <= self._max_age_s:
                    return False
            self._drop_first(first)
        return True

    @property
    def _is_over(self) -> bool:
        return self._num_bytes > self.max_bytes and self._num_elements > 1

    @property
    def _num_elements(self) -> int:
        return len(self._swept.seqs) + len(self._rest.seqs)

    @property
    def _front(self) -> _Elements:
        return self._swept if self._swept.seqs else self._rest

    def _first(self) -> BoundedLog | None:
        """Return the journal with the oldest entry of all, or None if the first element is void."""
        journal, seq = self._front.journals[0](), self._front.seqs[0]
        if journal is None or journal.first_seq != seq or journal.oldest_s is None:
            return None
        return journal

    def _drop_first(self, first: BoundedLog | None) -> None:
        self._front.pop()
        if first is not None:
            first.drop_oldest()

    def _sweep(self) -> None:
        """Look at a few elements and remove the void ones; the sweep ends with the newest."""
        for _ in range(min(SWEPT_PER_ENTRY, len(self._rest.seqs))):
            weak, seq = self._rest.pop()
            journal = weak()
            if journal is not None and journal.first_seq <= seq:
                self._swept.push(weak, seq)
        self._is_sweeping = bool(self._rest.seqs)
        if not self._is_sweeping:
            self._swept, self._rest = self._rest, self._swept
