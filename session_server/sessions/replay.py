"""Bound the journals of all sessions together, in bytes and age. The oldest entries go first.

A queue holds the journal and the sequence number of every entry, in the order they were written.
Its first element is the oldest entry of all. If that journal is gone or has dropped the entry
itself, the element is void and skipped. Dropping an entry therefore costs O(1), however many
sessions there are. A sweep removes void elements once they outnumber the others.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final
from weakref import ref

if TYPE_CHECKING:
    from session_server.sessions.journal import Journal

OVERSIZE_GRACE_S: Final = 10.0
"""How long an entry larger than its journal's bound is kept for those who read now."""

ENTRIES_PER_SLICE: Final = 64
"""Entries dropped for their age per call: about a tenth of a millisecond."""

_MIN_SWEEP: Final = 1024


class Replay:
    """Bound the journals of all sessions. They are referenced weakly: one without readers is
    freed."""

    def __init__(self, *, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._num_bytes = 0
        self._num_entries = 0
        # Two queues and not one of pairs: an element takes 16 bytes instead of 80.
        self._journals: deque[ref[Journal]] = deque()
        self._seqs: deque[int] = deque()
        self._oversize: deque[tuple[float, ref[Journal]]] = deque()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all journals."""
        return self._num_bytes

    def add(self, journal: Journal, seq: int, num_bytes: int) -> None:
        """Count entry `seq` that `journal` has just written, and drop old entries to make room for
        it.

        Every other entry may be dropped for it; it stays.
        """
        self._num_bytes += num_bytes
        self._num_entries += 1
        self._journals.append(ref(journal))
        self._seqs.append(seq)
        while self._num_bytes > self._max_bytes and len(self._journals) > 1:
            first = self._first()
            self._pop_first()
            if first is not None:
                first.drop_oldest()
        if len(self._journals) > 2 * self._num_entries + _MIN_SWEEP:
            self._sweep()

    def remove(self, num_bytes: int, num_entries: int = 1) -> None:
        """Stop counting entries that a journal has dropped, or that are freed with it."""
        self._num_bytes -= num_bytes
        self._num_entries -= num_entries

    def trim_later(self, journal: Journal, now_s: float) -> None:
        """Schedule the trim of a journal whose newest entry exceeds its bound, so that readers get
        it."""
        self._oversize.append((now_s + OVERSIZE_GRACE_S, ref(journal)))

    def drop_old(self, now_s: float) -> bool:
        """Drop entries that are too old or too large; look only at those that are due.

        Returns:
            Whether there may be more than is dropped at a time.
        """
        while self._oversize and self._oversize[0][0] <= now_s:
            journal = self._oversize.popleft()[1]()
            if journal is not None:
                journal.trim()
        for _ in range(ENTRIES_PER_SLICE):
            if not self._journals:
                return False
            first = self._first()
            if first is not None:
                assert first.oldest_s is not None, "the first element is not void"
                if now_s - first.oldest_s <= self._max_age_s:
                    return False
            self._pop_first()
            if first is not None:
                first.drop_oldest()
        return True

    def _first(self) -> Journal | None:
        """Return the journal with the oldest entry of all, or None if the first element is void."""
        journal = self._journals[0]()
        if journal is None or journal.first_seq != self._seqs[0] or journal.oldest_s is None:
            return None
        return journal

    def _pop_first(self) -> None:
        self._journals.popleft()
        self._seqs.popleft()

    def _sweep(self) -> None:
        """Remove void elements."""
        journals: deque[ref[Journal]] = deque()
        seqs: deque[int] = deque()
        for weak, seq in zip(self._journals, self._seqs, strict=True):
            journal = weak()
            if journal is not None and journal.first_seq <= seq:
                journals.append(weak)
                seqs.append(seq)
        self._journals, self._seqs = journals, seqs
