"""Segments are found by their tokens, as a list of all that were added would find them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.components import components_of
from cache.tiers.segment import Segment, chain_after, first_chain
from cache.tiers.segment_tree import SEGMENT_BYTES, Path, SegmentTree
from cache.types import Namespace, Tokens
from tests.cache.kv_world import (
    NAMESPACES,
    POOL,
    STATE_POOL,
    WINDOW,
    WINDOW_POOL,
    Mixture,
    make_spec,
)
from tests.depth import at_depth

PAGE_SIZE = 2
ALICE, BOB = NAMESPACES
PAGE_BYTES = {POOL: 10, WINDOW_POOL: 100, STATE_POOL: 1000}

Kept = dict[Namespace, set[tuple[int, ...]]]
"""Every whole page that a segment has, as all tokens up to its end."""


def make_tree(mixture: Mixture = "full") -> SegmentTree:
    """An empty one."""
    return SegmentTree(PAGE_SIZE, PAGE_BYTES, components_of(make_spec(PAGE_SIZE, mixture)))


def extend(tree: SegmentTree, tokens: Tokens, namespace: Namespace = ALICE) -> Segment | None:
    """Add what the tree lacks of a path, as one segment."""
    path = tree.find(namespace, tokens)
    added = tokens[path.length : len(tokens) - len(tokens) % PAGE_SIZE]
    if not len(added):
        return None
    spans = {POOL: (path.length // PAGE_SIZE, (path.length + len(added)) // PAGE_SIZE)}
    return tree.add(namespace, path, added, spans)


def remove(tree: SegmentTree, segment: Segment) -> list[Segment]:
    """Remove a segment, and all that follow it one at a time, which are lost until then."""
    removed, left = [segment], [tree.remove(segment)]
    while left:
        assert {each.number for each in tree.lost()} >= {each.number for each in left[-1].values()}
        if not left[-1]:
            left.pop()
            continue
        _, each = left[-1].popitem()
        left.append(tree.remove(each))
        removed.append(each)
    assert not tree.lost()
    return removed


def array(tokens: list[int]) -> Tokens:
    return np.array(tokens, np.int32)


@dataclass(frozen=True)
class Step:
    """Add a path, or remove the segment in which it ends."""

    tokens: list[int]
    namespace: Namespace
    is_removal: bool


STEPS = st.lists(
    st.builds(
        Step, st.lists(st.integers(0, 1), max_size=12), st.sampled_from(NAMESPACES), st.booleans()
    ),
    max_size=20,
)


@settings(max_examples=at_depth(200, proof=5_000), deadline=None)
@given(steps=STEPS)
def test_a_tree_finds_what_was_added_and_not_removed(steps: list[Step]) -> None:
    tree = make_tree()
    live: dict[int, Segment] = {}
    for step in steps:
        path = tree.find(step.namespace, array(step.tokens))
        if not step.is_removal:
            added = extend(tree, array(step.tokens), step.namespace)
            if added is not None:
                live[added.number] = added
        elif path.parts:
            segment, parent = path.parts[-1].segment, path.parts[-1].segment.parent
            below = {each.number for each in segment.below()}
            removed = remove(tree, segment)
            assert removed[0] is segment
            assert {each.number for each in removed[1:]} == below
            for each in removed:
                del live[each.number]
                # Whoever knows it finds what is before it, and keeps nothing of what is not.
                assert (each.parent, len(each.content.tokens), each.children) == (parent, 0, {})
        assert {each.number for each in tree.segments()} == live.keys()
        assert len(tree) == len(live)
        kept = pages_of(live)
        for other in steps:
            found = tree.find(other.namespace, array(other.tokens))
            assert found.length == longest(kept[other.namespace], other.tokens)
            check(tree, found, other)
    for segment in list(live.values()):
        if tree.get(segment.number) is segment:
            remove(tree, segment)
    assert not tree._roots
    assert not tree._segments


def pages_of(live: dict[int, Segment]) -> Kept:
    """What all segments have, found out by following each to its beginning."""
    kept: Kept = {ALICE: set(), BOB: set()}
    for segment in live.values():
        # A segment may follow another one at any page of that: its beginning is what names it.
        before: list[int] = []
        at, start = segment, segment.content.start
        while at.parent is not None:
            at = at.parent
            before = at.content.tokens[: start - at.content.start].tolist() + before
            start = at.content.start
        whole = before + segment.content.tokens.tolist()
        assert len(before) == segment.content.start
        for end in range(len(before) + PAGE_SIZE, len(whole) + 1, PAGE_SIZE):
            kept[segment.content.namespace].add(tuple(whole[:end]))
    return kept


def longest(kept: set[tuple[int, ...]], tokens: list[int]) -> int:
    """The whole pages of a path that are there without a gap."""
    length = 0
    while length + PAGE_SIZE <= len(tokens) and tuple(tokens[: length + PAGE_SIZE]) in kept:
        length += PAGE_SIZE
    return length


def check(tree: SegmentTree, found: Path, step: Step) -> None:
    """A path says what its parts are, and by what name the next one would go."""
    tokens, at = array(step.tokens), 0
    for part in found.parts:
        assert part.segment.content.start == at
        assert part.segment.content.namespace == step.namespace
        held = part.segment.content.tokens[: part.end - at]
        assert np.array_equal(held, tokens[at : part.end])
        at = part.end
    assert at == found.length
    chain = chain_after(first_chain(step.namespace), tokens[:at], PAGE_SIZE)
    assert found.chain == chain
    if at + PAGE_SIZE <= len(tokens):
        assert found.next_name == chain_after(chain, tokens[at : at + PAGE_SIZE], PAGE_SIZE)
    else:
        assert found.next_name is None
    assert tree.has(found)


def test_what_two_paths_have_in_common_is_there_once_and_one_may_leave_anywhere() -> None:
    tree = make_tree()
    first = extend(tree, array([1, 2, 3, 4, 5, 6, 7, 8]))
    second = extend(tree, array([1, 2, 3, 4, 9, 9]))
    assert first is not None
    assert second is not None
    assert second.parent is first
    assert second.content.tokens.tolist() == [9, 9]
    assert second.content.start == 4
    assert extend(tree, array([1, 2, 3, 4, 9, 9, 0])) is None
    assert tree.find(BOB, array([1, 2, 3, 4])).length == 0
    assert remove(tree, first) == [first, second]


def test_a_path_is_readable_up_to_what_is_only_on_its_way() -> None:
    tree, tokens = make_tree(), array([1, 2, 3, 4, 5, 6])
    for end in (2, 4, 6):
        extend(tree, tokens[:end])
    path = tree.find(ALICE, tokens)
    for index, length in ((None, 6), (2, 4), (1, 2), (0, 0)):
        for at, part in enumerate(path.parts):
            part.segment.in_host = at != index
        found = path.readable(from_disk=True)
        assert found.length == length
        assert found.chain == chain_after(first_chain(ALICE), tokens[:length], PAGE_SIZE)
    path.parts[0].segment.on_disk = True
    assert path.readable(from_disk=True).length == 6


def test_a_segment_counts_what_it_takes() -> None:
    tree, tokens = make_tree("full + window"), array([1, 2, 3, 4])
    spans = {POOL: (0, 2), WINDOW_POOL: (1, 2)}
    assert tree.bytes_of(tokens, spans) == SEGMENT_BYTES + 16 + 20 + 100


@pytest.mark.parametrize("end", range(0, 13, PAGE_SIZE))
@pytest.mark.parametrize("lost", range(7))
def test_a_path_goes_on_from_where_its_window_is_whole(end: int, lost: int) -> None:
    """The segment lacks the window's first `lost` pages: only behind a whole window a forward can
    continue, or where it reads nothing of before."""
    tree = make_tree("full + window")
    tokens = np.arange(12, dtype=np.int32)
    tree.add(ALICE, tree.find(ALICE, tokens), tokens, {POOL: (0, 6), WINDOW_POOL: (lost, 6)})
    length = tree.continuable_len(tree.find(ALICE, tokens[:end]), 0)
    window = components_of(make_spec(PAGE_SIZE, "full + window"))[1]
    whole = [n for n in range(0, end + 1, PAGE_SIZE) if n == 0 or window.first_page(n) >= lost]
    assert length == max(whole)
    assert WINDOW == 6


def test_a_path_goes_on_from_a_state_alone() -> None:
    tree = make_tree("full + recurrent")
    tokens = np.arange(12, dtype=np.int32)
    tree.add(ALICE, tree.find(ALICE, tokens), tokens[:8], {POOL: (0, 4), STATE_POOL: (3, 4)})
    assert tree.continuable_len(tree.find(ALICE, tokens), 0) == 8
    assert tree.continuable_len(tree.find(ALICE, tokens[:6]), 0) == 0


def test_no_path_is_taken_for_another_however_its_tokens_are_cut() -> None:
    chains = {first_chain(Namespace(salt, model)) for salt, model in [("ab", "c"), ("a", "bc")]}
    assert len(chains) == 2
    tokens = np.arange(8, dtype=np.int32)
    chain = first_chain(ALICE)
    whole = chain_after(chain, tokens, 2)
    assert whole == chain_after(chain_after(chain, tokens[:4], 2), tokens[4:], 2)
    assert whole != chain_after(chain, tokens, 4)
