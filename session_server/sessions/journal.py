"""Keep the log of one session: entries with sequence numbers, written once, read by many.

A turn does not depend on a socket: it writes to the journal, and connections are readers that may
reconnect. The log keeps a bounded tail; a reader that asks for older entries gets `OffsetLost` and
takes a snapshot instead (the offset + epoch scheme of Centrifugo).
"""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from session_server.core.session_events import SessionClosed, SessionEntry
from session_server.sessions.footprint import entry_bytes
from session_server.sessions.replay import ENTRIES_PER_SLICE, OVERSIZE_GRACE_S, Replay

READ_BYTES: Final = 1 << 18
"""Bytes of entries that a reader takes at a time. A slow reader holds them after the journal has
dropped them."""


class OffsetLost(Exception):
    """Report that the entries after `after_seq` are no longer, or not yet, in the journal.

    `first_seq` is the oldest entry still kept, `last_seq` the newest; take a snapshot and read on
    after its `seq`.
    """

    def __init__(self, after_seq: int, first_seq: int, last_seq: int) -> None:
        super().__init__(f"entry {after_seq} is outside [{first_seq - 1}, {last_seq}]")
        self.after_seq = after_seq
        self.first_seq = first_seq
        self.last_seq = last_seq


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """Bound what one journal keeps; the first bound that is exceeded drops the oldest entries, a
    slice at a time.

    An entry that is larger than `max_bytes` by itself counts nothing for a few seconds, or until
    the next such entry: those who read now get it and what is before it
    (`replay.OVERSIZE_GRACE_S`).
    """

    max_bytes: int = 4 << 20
    max_entries: int = 16_384
    max_age_s: float = 300.0


class JournalEntry(msgspec.Struct, frozen=True, gc=False):
    """Hold one entry as readers get it. `seq` counts without gaps, of a new session from 1;
    `at_s` is monotonic time."""

    seq: int
    at_s: float
    num_bytes: int
    entry: SessionEntry


_NO_ENTRIES: Final[deque[JournalEntry]] = deque(maxlen=0)
"""Stands in every journal until its first entry: an empty deque takes 760 bytes."""


class Journal:
    """Append entries to a bounded log. It belongs to the event loop's thread; readers never block
    the writer."""

    def __init__(
        self,
        limits: JournalLimits | None = None,
        *,
        replay: Replay | None = None,
        clock: Callable[[], float] = time.monotonic,
        last_seq: int = 0,
    ) -> None:
        """Create an empty journal. `replay` bounds it together with others; None leaves it to
        `limits` alone. `last_seq`: the number behind which its entries are counted."""
        self.epoch = secrets.token_hex(8)
        self._limits = limits or JournalLimits()
        self._replay = replay or Replay(max_bytes=sys.maxsize, max_age_s=math.inf)
        self._clock = clock
        self._entries = _NO_ENTRIES
        self._num_bytes = 0
        self._oversize_seq = self._oversize_bytes = 0
        self._oversize_due_s = 0.0
        self._last_seq = last_seq
        self._is_closed = False
        self._listeners: dict[Callable[[], None], None] = {}
        """In the order in which they came; a set would wake them in another one in every run."""

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest entry; where there was none yet, that before the first."""
        return self._last_seq

    @property
    def first_seq(self) -> int:
        """Return the sequence number of the oldest entry kept (`last_seq` + 1 if none is)."""
        return self._last_seq - len(self._entries) + 1

    def __del__(self) -> None:
        # A closed journal lives as long as its last reader, and its bytes with it.
        self._replay.remove(self._num_bytes, len(self._entries))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of what is kept."""
        return self._num_bytes

    @property
    def num_entries(self) -> int:
        """Return how many entries are kept."""
        return len(self._entries)

    @property
    def oldest_s(self) -> float | None:
        """Return when the oldest entry was written that may be dropped; None if there is none.

        The entry that says that the session is closed stays: readers wait for it.
        """
        if len(self._entries) <= self._is_closed:
            return None
        return self._entries[0].at_s

    @property
    def has_listeners(self) -> bool:
        """Return whether anybody is told of each entry."""
        return bool(self._listeners)

    @property
    def newest(self) -> JournalEntry:
        """Return the newest entry, which must be kept."""
        return self._entries[-1]

    @property
    def is_closed(self) -> bool:
        """Return whether `SessionClosed` was written; nothing follows it."""
        return self._is_closed

    @property
    def is_suspended(self) -> bool:
        """Return whether nothing follows, and the session goes on elsewhere: see `suspend`."""
        newest = self._entries[-1].entry if self._entries else None
        return self._is_closed and not isinstance(newest, SessionClosed)

    def append(self, entry: SessionEntry, num_bytes: int | None = None) -> int:
        """Write one entry, tell the listeners, and return its sequence number. `num_bytes`: its
        `entry_bytes`, if the caller knows them."""
        assert not self._is_closed, "an entry after SessionClosed"
        self._last_seq += 1
        now_s = self._clock()
        num_bytes = entry_bytes(entry) if num_bytes is None else num_bytes
        if self._entries is _NO_ENTRIES:
            self._entries = deque()
        self._entries.append(JournalEntry(self._last_seq, now_s, num_bytes, entry))
        self._num_bytes += num_bytes
        self._is_closed = isinstance(entry, SessionClosed)
        if num_bytes > self._limits.max_bytes:
            self._oversize_seq, self._oversize_bytes = self._last_seq, num_bytes
            self._oversize_due_s = now_s + OVERSIZE_GRACE_S
            self._replay.trim_later(self, self._oversize_due_s)
        self.trim(now_s)
        self._replay.add(self, self._last_seq, num_bytes)
        self._notify_listeners()
        return self._last_seq

    def suspend(self) -> None:
        """End the log of a session that goes on without it, in another process or when it is read
        again: nobody is told of an end."""
        self._is_closed = True
        self._notify_listeners()

    def read(
        self, after_seq: int, *, max_entries: int = 1024, max_bytes: int = READ_BYTES
    ) -> Sequence[JournalEntry]:
        """Return up to `max_entries` entries after `after_seq`, oldest first; empty if there are
        none. The first one may exceed `max_bytes`.

        Raises:
            OffsetLost: some of them were dropped, or `after_seq` lies in the future (an offset of
                another epoch).
        """
        if not self.first_seq - 1 <= after_seq <= self._last_seq:
            raise OffsetLost(after_seq, self.first_seq, self._last_seq)
        num_new = min(self._last_seq - after_seq, max_entries)
        start = after_seq - self.first_seq + 1
        if start > len(self._entries) // 2:
            # A deque is cheap at its ends only, and a live reader is always near the newest one.
            start -= len(self._entries)
        found: list[JournalEntry] = []
        num_bytes = 0
        for index in range(start, start + num_new):
            num_bytes += self._entries[index].num_bytes
            if found and num_bytes > max_bytes:
                break
            found.append(self._entries[index])
        return found

    def find(self, seq: int) -> SessionEntry | None:
        """Return entry `seq`, or None if it was dropped."""
        index = seq - self.first_seq
        return self._entries[index].entry if 0 <= index < len(self._entries) else None

    async def wait(self, after_seq: int) -> bool:
        """Wait until an entry after `after_seq` exists and return True; return False if none can
        come."""
        while self._last_seq <= after_seq and not self._is_closed:
            written = asyncio.Event()
            self.add_listener(written.set)
            try:
                await written.wait()
            finally:
                self.remove_listener(written.set)
        return self._last_seq > after_seq

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each entry. It must not write, add or remove anything at once."""
        self._listeners[listener] = None

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Stop calling `listener`."""
        self._listeners.pop(listener, None)

    def drop_oldest(self) -> None:
        """Drop the oldest entry."""
        dropped = self._entries.popleft()
        self._num_bytes -= dropped.num_bytes
        if dropped.seq == self._oversize_seq:
            self._oversize_bytes = 0
        self._replay.remove(dropped.num_bytes)

    def trim(self, now_s: float) -> None:
        """Drop entries until the bounds hold, a slice at a time."""
        if now_s >= self._oversize_due_s:
            self._oversize_bytes = 0
        for _ in range(ENTRIES_PER_SLICE):
            if not self._is_over() or self.oldest_s is None:
                return
            self.drop_oldest()
        self._replay.trim_later(self)

    def _is_over(self) -> bool:
        limits, num_bytes = self._limits, self._num_bytes - self._oversize_bytes
        return num_bytes > limits.max_bytes or len(self._entries) > limits.max_entries

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()
