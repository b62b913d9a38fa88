"""`TierAccount`: account for the bytes of one tier, and say which segments give way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from cache.lazy_heap import LazyHeap
from cache.tiers.segment import Segment


class TierAccount:
    """Count the segments that take room in one tier, by tenant and last use.

    Who has most gives way first, as in the pools; of what it has the segment that was used longest
    ago. `max_bytes` is never exceeded: ask for room before `add`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_segments = 0
        self._of_tenants: dict[str, _Share] = {}
        self._largest_first: LazyHeap[str] = LazyHeap(self._of_tenants.__contains__)

    def __contains__(self, segment: Segment) -> bool:
        share = self._of_tenants.get(segment.content.namespace.tenant)
        return share is not None and segment.number in share.oldest_first

    @property
    def free_bytes(self) -> int:
        """Return the bytes that are left."""
        return self.max_bytes - self.num_bytes

    def add(self, segment: Segment) -> None:
        """Count a segment as the one used last."""
        assert segment.content.num_bytes <= self.free_bytes, "room is made before it is taken"
        tenant = segment.content.namespace.tenant
        self._of_tenants.setdefault(tenant, _Share()).oldest_first[segment.number] = segment
        self.num_segments += 1
        self._change(tenant, segment.content.num_bytes)

    def remove(self, segment: Segment) -> None:
        """Count a segment no longer."""
        tenant = segment.content.namespace.tenant
        share = self._of_tenants[tenant]
        del share.oldest_first[segment.number]
        if not share.oldest_first:
            del self._of_tenants[tenant]
            self._largest_first.remove(tenant)
        self.num_segments -= 1
        self._change(tenant, -segment.content.num_bytes)

    def touch(self, segments: Iterable[Segment]) -> None:
        """Count segments as used now; the first of a path are then the last to give way."""
        for segment in reversed(tuple(segments)):
            share = self._of_tenants.get(segment.content.namespace.tenant)
            if share is not None and segment.number in share.oldest_first:
                share.oldest_first.move_to_end(segment.number)

    def next_to_give(self, may_give: Callable[[Segment], bool], num_tried: int) -> Segment | None:
        """Return the first of the next `num_tried` segments that may give way; None if none of them
        may."""
        tenant = self._largest_first.first()
        if tenant is None:
            return None
        for segment, _ in zip(
            self._of_tenants[tenant].oldest_first.values(), range(num_tried), strict=False
        ):
            if may_give(segment):
                return segment
        return None

    def _change(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if (share := self._of_tenants.get(tenant)) is not None:
            share.num_bytes += num_bytes
            self._largest_first.push(tenant, -share.num_bytes, 0)


class _Share:
    """Hold what one tenant has in a tier."""

    __slots__ = ("num_bytes", "oldest_first")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.oldest_first: OrderedDict[int, Segment] = OrderedDict()
