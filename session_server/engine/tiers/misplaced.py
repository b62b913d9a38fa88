"""`misplaced`: segments that are not where the tree and the accounts say."""

from __future__ import annotations

from collections.abc import Iterator

from cache.tiers.segment_tree import SegmentTree
from cache.tiers.tier_account import TierAccount


def misplaced(tree: SegmentTree, host: TierAccount, disk: TierAccount) -> Iterator[str]:
    """Say of each segment of a tree what is wrong with its place. O(segments)."""
    for segment in tree.segments():
        who = f"segment {segment.number}"
        if segment.in_host and segment not in host:
            yield f"{who} is in host memory and not counted there"
        if (segment.on_disk or segment.is_writing) and segment not in disk:
            yield f"{who} is on disk and not counted there"
        if segment not in host and segment not in disk:
            yield f"{who} is nowhere"
        parent, start = segment.parent, segment.content.start
        if parent is None:
            if start:
                yield f"{who} follows nothing and begins at {start}"
        elif not (
            tree.get(parent.number) is parent
            and parent.children.get(segment.content.name) is segment
            and parent.content.start < start <= parent.content.end
        ):
            yield f"{who} does not follow the segment that it hangs below"
