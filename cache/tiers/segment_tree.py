"""`SegmentTree`: find segments by their tokens.

A segment hangs below the one it follows, under its name. Unlike an edge of `RadixCache` it is never
split: a segment may follow another one at any page of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cache.components import Component
from cache.tiers.segment import (
    Chain,
    Segment,
    SegmentContent,
    chain_after,
    first_chain,
    tenant_tag,
)
from cache.types import NULL_PAGE, Namespace, Pages, PoolName, Tokens

SEGMENT_BYTES: Final = 4096
"""What a segment takes beside its tokens and pages, in host memory and in its file: at most this
much."""


@dataclass(frozen=True, slots=True)
class PathPart:
    """Name the first pages of a segment, up to `end` tokens of the path."""

    segment: Segment
    end: int


@dataclass(frozen=True, slots=True)
class Path:
    """Describe what the segments hold of some tokens: [0, length), whole pages.

    `next_name`: the name that a segment which goes on would have; None where the tokens end.
    """

    parts: tuple[PathPart, ...]
    length: int
    chain: Chain
    next_name: Chain | None

    def followed_by(self, segment: Segment) -> Path:
        """Return the same with a segment that was added behind it."""
        content = segment.content
        part = PathPart(segment, content.end)
        return Path((*self.parts, part), content.end, content.end_chain, None)

    def readable(self, *, from_disk: bool) -> Path:
        """Return the same up to the first segment that cannot be read yet, or not `from_disk`."""
        for index, part in enumerate(self.parts):
            if not (part.segment.is_readable if from_disk else part.segment.in_host):
                length = part.segment.content.start
                return Path(self.parts[:index], length, part.segment.content.chain, None)
        return self


class SegmentTree:
    """Hold the segments of all namespaces. The caller accounts for where their bytes are."""

    def __init__(
        self, page_size: int, page_bytes: Mapping[PoolName, int], components: Sequence[Component]
    ) -> None:
        """Create an empty tree. `page_bytes`: of one page of each pool."""
        self.page_size = page_size
        self.page_bytes = page_bytes
        self._components = tuple(components)
        self.least_page_bytes = page_size * np.dtype(np.int32).itemsize + sum(
            page_bytes[each.pool] for each in components if not each.is_bounded
        )
        """What a page of a segment takes at least: of bounded pools it may have none."""

        self._roots: dict[Namespace, dict[Chain, Segment]] = {}
        self._segments: dict[int, Segment] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, number: int) -> Segment | None:
        """Return a segment by its number; None if it was removed."""
        return self._segments.get(number)

    def living(self, segment: Segment | None) -> Segment | None:
        """Return a segment, or the nearest one before it that was not removed."""
        while segment is not None and self.get(segment.number) is not segment:
            segment = segment.parent
        return segment

    def has(self, path: Path) -> bool:
        """Return whether the segments of a path are still there. One that follows a removed one
        may not have been removed yet."""
        return all(self.get(part.segment.number) is not None for part in path.parts)

    def segments(self) -> Sequence[Segment]:
        """Return all segments that can be found; O(segments), for audits."""
        return tuple(each for root in self._tops() for each in (root, *root.below()))

    def lost(self) -> Sequence[Segment]:
        """Return those that followed a removed one and were not removed yet. O(segments)."""
        found = {each.number for each in self.segments()}
        return tuple(each for number, each in self._segments.items() if number not in found)

    def find(self, namespace: Namespace, tokens: Tokens) -> Path:
        """Return what the segments hold of the whole pages of `tokens`. O(tokens)."""
        page_size = self.page_size
        num_whole = len(tokens) - len(tokens) % page_size
        children = self._roots.get(namespace, {})
        chain, at, parts = first_chain(namespace), 0, list[PathPart]()
        while at < num_whole:
            name = chain_after(chain, tokens[at : at + page_size], page_size)
            segment = children.get(name)
            if segment is None:
                return Path(tuple(parts), at, chain, name)
            held = segment.content.tokens
            common = _common_pages(held, tokens[at:num_whole], page_size) * page_size
            # The whole path is not hashed again, which would take a millisecond for 20,000 tokens.
            is_whole = common == len(held)
            chain = (
                segment.content.end_chain
                if is_whole
                else chain_after(chain, held[:common], page_size)
            )
            at += common
            parts.append(PathPart(segment, at))
            children = segment.children
        return Path(tuple(parts), at, chain, None)

    def add(
        self,
        namespace: Namespace,
        path: Path,
        tokens: Tokens,
        spans: Mapping[PoolName, tuple[int, int]],
    ) -> Segment:
        """Add a segment that follows a path, which `find` has just returned for its tokens.
        `spans`: see `Segment`."""
        assert len(tokens) >= self.page_size, "a segment has a page at least"
        assert len(tokens) % self.page_size == 0, "a segment has whole pages"
        first, rest = tokens[: self.page_size], tokens[self.page_size :]
        name = chain_after(path.chain, first, self.page_size)
        content = SegmentContent(
            namespace=namespace,
            chain=path.chain,
            name=name,
            end_chain=chain_after(name, rest, self.page_size),
            start=path.length,
            tokens=np.array(tokens, np.int32),
            spans=dict(spans),
            num_bytes=self.bytes_of(tokens, spans),
            num_token_bytes=tokens.nbytes,
            tag=tenant_tag(namespace.tenant),
        )
        self._num_added += 1
        segment = Segment(self._num_added, content)
        if path.parts:
            segment.parent = path.parts[-1].segment
        siblings = self._siblings(segment)
        assert segment.content.name not in siblings, "a path ends where no segment goes on"
        siblings[segment.content.name] = segment
        self._segments[segment.number] = segment
        return segment

    def tokens_up_to(self, segment: Segment) -> Tokens:
        """Return the tokens of a segment and of all before it. O(tokens)."""
        parts = [segment.content.tokens]
        while segment.parent is not None:
            before = segment.parent.content
            parts.append(before.tokens[: segment.content.start - before.start])
            segment = segment.parent
        return np.concatenate(parts[::-1])

    def page_bytes_of(self, num_pages: Mapping[PoolName, int]) -> int:
        """Return the bytes of so many pages of each pool."""
        return sum(count * self.page_bytes[pool] for pool, count in num_pages.items())

    def bytes_of(self, tokens: Tokens, spans: Mapping[PoolName, tuple[int, int]]) -> int:
        """Return the bytes that a segment takes."""
        num_pages = {pool: end - first for pool, (first, end) in spans.items()}
        return SEGMENT_BYTES + tokens.nbytes + self.page_bytes_of(num_pages)

    def remove(self, segment: Segment) -> dict[Chain, Segment]:
        """Remove a segment, and return those that follow it. They can be found no longer, and the
        caller removes them one at a time, taking them from what was returned or by name.

        Whoever knows one of them finds what is left of its path before it, and no more: the tokens
        of all that was ever removed would fill the memory."""
        siblings = self._siblings(segment)
        siblings.pop(segment.content.name, None)
        if not siblings and segment.parent is None:
            del self._roots[segment.content.namespace]
        del self._segments[segment.number]
        segment.parent = self.living(segment.parent)
        segment.content = segment.content.without_tokens()
        return segment.children

    def clear(self) -> dict[int, Segment]:
        """Remove all segments at once; return them, for the caller to take apart with `unlink` a
        few at a time: they refer to each other."""
        removed, self._segments, self._roots = self._segments, {}, {}
        return removed

    def continuable_len(self, path: Path, start: int) -> int:
        """Return the longest length of a path that a forward can continue from, if everything that
        a forward at `start` reads is there beside the pages of the segments; 0 if there is none.

        O(pages of the path) with bounded pools, else O(1).
        """
        length = path.length
        for component in self._components:
            if component.is_bounded:
                entries = self._entries(path, component, start)
                length = component.continuable_len(entries, length)
                length -= length % self.page_size
        return length

    def _entries(self, path: Path, component: Component, start: int) -> Pages:
        """Return 1 for each page of a path that is there, int32 [pages]; else `NULL_PAGE`."""
        entries = np.full(path.length // self.page_size, NULL_PAGE, np.int32)
        entries[component.first_page(start) : start // self.page_size] = 1
        for part in path.parts:
            first, end = part.segment.content.spans.get(component.pool, (0, 0))
            entries[first : min(end, part.end // self.page_size)] = 1
        return entries

    def _tops(self) -> Iterator[Segment]:
        return (each for roots in self._roots.values() for each in roots.values())

    def _siblings(self, segment: Segment) -> dict[Chain, Segment]:
        if segment.parent is not None:
            return segment.parent.children
        return self._roots.setdefault(segment.content.namespace, {})


def _common_pages(left: Tokens, right: Tokens, page_size: int) -> int:
    """Return how many leading whole pages two token arrays have in common."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return (int(differs[0]) if len(differs) else length) // page_size
