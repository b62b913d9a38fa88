"""`TierAccount`: account for the bytes of one tier, and say which segments give way."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cache.lazy_heap import LazyHeap
from cache.tiers.segment import Chain, Segment


class TierAccount:
    """Count the segments that take room in one tier, by tenant and last use.

    Who has most gives way first, as in the pools; of what it has the segment that was used longest
    ago. `max_bytes` is never exceeded: ask for room before `add`. Tenants are known by their tags.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_segments = self.num_token_bytes = 0
        self._of_tenants: dict[bytes, _Share] = {}
        self._largest_first: LazyHeap[bytes] = LazyHeap(self._of_tenants.__contains__)

    def __contains__(self, segment: Segment) -> bool:
        return self.named(segment.content.tag, segment.content.name) is segment

    def named(self, tag: bytes, name: Chain) -> Segment | None:
        """Return the segment of a tenant that has a name; None if none is counted."""
        share = self._of_tenants.get(tag)
        return None if share is None else share.segments.get(name)

    @property
    def free_bytes(self) -> int:
        """Return the bytes that are left."""
        return self.max_bytes - self.num_bytes

    def add(self, segment: Segment) -> None:
        """Count a segment as used when it says."""
        assert segment.content.num_bytes <= self.free_bytes, "room is made before it is taken"
        share = self._of_tenants.setdefault(segment.content.tag, _Share())
        share.segments[segment.content.name] = segment
        share.oldest_first.push(segment.content.name, segment.used_ns, 0)
        self.num_segments += 1
        self.num_token_bytes += segment.content.num_token_bytes
        self.change(segment.content.tag, segment.content.num_bytes)

    def remove(self, segment: Segment) -> None:
        """Count a segment no longer."""
        share = self._of_tenants[segment.content.tag]
        del share.segments[segment.content.name]
        share.oldest_first.remove(segment.content.name)
        self.num_segments -= 1
        self.num_token_bytes -= segment.content.num_token_bytes
        self.change(segment.content.tag, -segment.content.num_bytes)

    def change(self, tag: bytes, num_bytes: int) -> None:
        """Count bytes of a tenant, in segments or not, that were added or, below 0, are gone."""
        share = self._of_tenants.setdefault(tag, _Share())
        share.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if share.num_bytes:
            self._largest_first.push(tag, -share.num_bytes, 0)
        else:
            del self._of_tenants[tag]
            self._largest_first.remove(tag)

    def clear(self) -> None:
        """Count nothing."""
        self.num_bytes = self.num_segments = self.num_token_bytes = 0
        self._of_tenants = {}
        self._largest_first = LazyHeap(self._of_tenants.__contains__)

    def touch(self, segments: Iterable[Segment]) -> None:
        """Take note of when segments were used."""
        for segment in segments:
            if segment in self:
                share = self._of_tenants[segment.content.tag]
                share.oldest_first.push(segment.content.name, segment.used_ns, 0)

    def largest(self) -> bytes | None:
        """Return the tenant that has most; None if nobody has anything."""
        return self._largest_first.first()

    def next_to_give(self, may_give: Callable[[Segment], bool], num_tried: int) -> Segment | None:
        """Return the first of the next `num_tried` segments that may give way; None if none of them
        may."""
        tag = self.largest()
        if tag is None:
            return None
        share = self._of_tenants[tag]
        name = share.oldest_first.first_that(lambda each: may_give(share.segments[each]), num_tried)
        return None if name is None else share.segments[name]


class _Share:
    """Hold what one tenant has in a tier. `num_bytes`: also those that are not in segments."""

    __slots__ = ("num_bytes", "oldest_first", "segments")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.segments: dict[Chain, Segment] = {}
        self.oldest_first: LazyHeap[Chain] = LazyHeap()
