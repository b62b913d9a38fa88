"""`WriteQueue`: the segments in host memory that may be written to disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from cache.lazy_heap import LazyHeap
from cache.tiers.segment import Segment


class WriteQueue:
    """Hold segments in host memory that are not on disk. `under_way`: the one being written.
    `is_draining`: the engine ends, and what was used last is written first. `is_over`: its time to
    do so has passed, and nothing more is written."""

    def __init__(self) -> None:
        self.is_draining = self.is_over = False
        self.under_way: Segment | None = None
        self._hurried: OrderedDict[int, Segment] = OrderedDict()
        """Segments that somebody waits for; those that were asked for first come first."""

        self._waiting: dict[int, Segment] = {}
        self._latest_first: LazyHeap[int] = LazyHeap()
        self._failed: OrderedDict[int, Segment] = OrderedDict()
        """Segments that could not be written, and may be once the disk takes another one; in order,
        so that of a path the beginning comes first."""

        self._takes_writes = False
        self._watched: set[int] = set()
        self._changed: set[int] = set()
        """Watched segments, by number, of which something has become since."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, segment: Segment) -> bool:
        return segment.number in self._waiting

    def add(self, segment: Segment) -> None:
        """Add a segment."""
        self._waiting[segment.number] = segment
        self._latest_first.push(segment.number, -segment.used_ns, 0)

    def hurry(self, segments: Iterable[Segment]) -> None:
        """Have segments written before any other, those of them that are there."""
        self._hurried.update((each.number, each) for each in segments if each in self)

    @property
    def is_hurried(self) -> bool:
        """Return whether the next segment is written at once, whatever room host memory has."""
        return self.is_draining or bool(self._hurried)

    def remove(self, segment: Segment) -> None:
        """Remove a segment, if it is there."""
        self._waiting.pop(segment.number, None)
        self._hurried.pop(segment.number, None)
        self._failed.pop(segment.number, None)
        self._latest_first.remove(segment.number)
        self._note_change(segment)

    def clear(self) -> None:
        """Remove all segments. One that is being written still is."""
        self._waiting, self._failed, self._latest_first = {}, OrderedDict(), LazyHeap()
        self._hurried.clear()
        self._changed |= self._watched
        self._watched = set()

    def touch(self, segments: Iterable[Segment]) -> None:
        """Take note of when segments were used. What the disk did not take before, because it was
        full of what had been used later, may be written now."""
        for segment in segments:
            if segment.is_refused and segment.in_host and not self.has_failed(segment):
                segment.is_refused = False
                self.add(segment)
            elif segment in self:
                self._latest_first.push(segment.number, -segment.used_ns, 0)

    def end(self) -> None:
        """Write nothing more: what the engine's end was to write had its time."""
        self.is_draining, self.is_over = False, True

    def latest(self) -> Segment | None:
        """Return the segment that somebody waits for, else the one that was used last; None if
        there is none."""
        number = next(iter(self._hurried), None) or self._latest_first.first()
        return None if number is None else self._waiting[number]

    def beginning_of(self, segment: Segment) -> Segment:
        """Return what must be written before a segment, or itself: a file is found through those
        before it alone, and a process may end between any two."""
        while segment.parent is not None and segment.parent in self:
            segment = segment.parent
        return segment

    def has_failed(self, segment: Segment) -> bool:
        """Return whether a segment could not be written."""
        return segment.number in self._failed

    def fail(self, segment: Segment) -> None:
        """Note that a segment could not be written."""
        segment.is_refused, self._takes_writes = True, False
        self._failed[segment.number] = segment
        self._note_change(segment)

    def note_written(self, segment: Segment) -> None:
        """Note that a segment was written: the disk takes something."""
        self._takes_writes = True
        self._note_change(segment)

    def watch(self, segment: Segment) -> None:
        """Name a segment once something becomes of it: it is being written, or was, or could not
        be, or was dropped."""
        self._watched.add(segment.number)

    def unwatch(self, segment: Segment) -> None:
        """Do not name a segment any more."""
        self._watched.discard(segment.number)
        self._changed.discard(segment.number)

    def take_changed(self) -> set[int]:
        """Return the numbers of segments to be named, which are watched no more."""
        changed, self._changed = self._changed, set()
        return changed

    @property
    def may_try_again(self) -> bool:
        """Return whether something could not be written that may be now."""
        return self._takes_writes and bool(self._failed)

    def try_again(self) -> None:
        """Have one of those written."""
        _, segment = self._failed.popitem(last=False)
        segment.is_refused = False
        self.add(segment)

    def _note_change(self, segment: Segment) -> None:
        if segment.number in self._watched:
            self._watched.remove(segment.number)
            self._changed.add(segment.number)
