"""Which pages are looked at, in which order, and which sessions are named."""

from __future__ import annotations

import pytest

from cache.checker import find_violations
from cache.content import MAX_SKIPPED, PageContent, PageScrubber
from cache.types import NULL_PAGE, RowId, SessionId, pages_for
from tests.cache.kv_world import POOL, WINDOW, WINDOW_POOL, Mixture, World, make_cache
from tests.cache.two_sessions import ALICE, BOB, A, B, C, run_turn

LENGTHS = {A: 5, B: 9, C: 30}


def make_parked() -> World:
    """Three sessions of different lengths, each with another first token."""
    world = World(make_cache(4, num_pages=60), 4)
    for number, (session_id, length) in enumerate(LENGTHS.items()):
        world.open(session_id, ALICE)
        run_turn(world, session_id, [number, *([1] * (length - 1))])
    return world


def pages_of(world: World, session_id: SessionId) -> list[int]:
    view = world.cache.slot(session_id)
    slot = world.cache.inspect().slots[session_id]
    assert slot.lease is not None
    entries = world.cache.inspect().stores.rows.entries(POOL, slot.lease.row)
    return [int(page) for page in entries[: view.allocated_len // 4]]


def look(scrubber: PageScrubber, world: World) -> PageContent:
    content = scrubber.next(world.cache)
    assert content is not None
    return content


def test_a_round_takes_one_page_of_every_session() -> None:
    world, scrubber = make_parked(), PageScrubber()
    for _ in range(4):
        assert [look(scrubber, world).session_id for _ in LENGTHS] == list(LENGTHS)


def test_no_page_is_left_out_and_each_is_what_it_says() -> None:
    world, scrubber = make_parked(), PageScrubber()
    longest = max(len(pages_of(world, session_id)) for session_id in LENGTHS)
    seen = set()
    for _ in range(longest * len(LENGTHS)):
        content = look(scrubber, world)
        history = world.cache.tokens(content.session_id)
        end = min(content.start + 4, world.cache.slot(content.session_id).committed_len)
        assert content.tokens.tolist() == history[content.start : end].tolist()
        assert content.pages == {POOL: pages_of(world, content.session_id)[content.start // 4]}
        seen.add(content.pages[POOL])
    assert seen == {page for session_id in LENGTHS for page in pages_of(world, session_id)}


def test_who_is_lent_cold_or_gone_is_passed_over() -> None:
    world, scrubber = make_parked(), PageScrubber()
    assert look(scrubber, world).session_id == A
    world.begin(B, [2])
    world.cache.cool(C)
    assert look(scrubber, world).session_id == A
    world.cache.close(A)
    assert scrubber.next(world.cache) is None


def test_one_choice_looks_at_a_few_sessions_and_the_next_goes_on_from_there() -> None:
    world, scrubber = World(make_cache(4, num_pages=200, num_rows=60), 4), PageScrubber()
    for number in range(2 * MAX_SKIPPED + 3):
        world.open(SessionId(f"s{number}"), ALICE)
        run_turn(world, SessionId(f"s{number}"), [number, 1, 2])
    last = SessionId(f"s{2 * MAX_SKIPPED + 2}")
    world.cache.close(SessionId("s0"))
    assert look(scrubber, world).session_id == "s1"
    for session_id in list(world.cache.parked.session_ids()):
        if session_id != last:
            world.begin(session_id, [1])
    assert scrubber.next(world.cache) is None
    assert scrubber.next(world.cache) is None
    assert look(scrubber, world).session_id == last


def test_the_same_cache_is_looked_at_in_the_same_order() -> None:
    world = make_parked()
    one, two = PageScrubber(), PageScrubber()
    for _ in range(50):
        first, second = look(one, world), look(two, world)
        assert (first.session_id, first.start) == (second.session_id, second.start)


@pytest.mark.parametrize("mixture", ["full + window", "window"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_where_a_window_let_go_only_what_can_be_computed_again_is_looked_at(
    page_size: int, mixture: Mixture
) -> None:
    cache = make_cache(page_size, num_pages=99, mixture=mixture, max_context_len=60)
    world, scrubber = World(cache, page_size), PageScrubber()
    starts: dict[SessionId, set[int]] = {}
    for session_id, length in ((A, 1), (C, 30)):
        starts[session_id] = set()
        world.open(session_id, ALICE)
        run_turn(world, session_id, [1] * length)
    for _ in range(99):
        content = look(scrubber, world)
        slot = cache.inspect().slots[content.session_id]
        assert slot.lease is not None
        entries = cache.inspect().stores.rows.entries(WINDOW_POOL, slot.lease.row)
        first_read = max(0, content.start - WINDOW + 1) // page_size
        assert all(entries[first_read : content.start // page_size + 1])
        assert content.pages[WINDOW_POOL] == entries[content.start // page_size]
        starts[content.session_id].add(content.start)
    assert len(starts[A]) == pages_for(3, page_size), "nothing was let go of"
    assert not starts[C], "it holds what its next token reads, which is less than its last one read"


def test_a_page_let_go_is_not_what_others_share() -> None:
    """The null page stands in every row that let go of something."""
    cache = make_cache(4, num_pages=99, mixture="window", max_context_len=60)
    world = World(cache, 4)
    for session_id in (A, B):
        world.open(session_id, ALICE)
        run_turn(world, session_id, [int(session_id == A), *([1] * 20)])
    content = PageContent(A, RowId(0), 0, world.cache.tokens(A)[:4], {WINDOW_POOL: NULL_PAGE})
    (violation,) = PageScrubber().attribute(cache, content)
    assert violation.session_id is None


def sharing_world() -> World:
    """A and B share two pages, A and C one; each ends in a page of its own."""
    world = World(make_cache(4, num_pages=60), 4)
    shared = [0, 1, 2, 0, 1, 1, 2, 2]
    for session_id, tokens in (
        (A, [*shared, 0, 0, 0, 0]),
        (B, [*shared, 1, 1, 1, 1]),
        (C, [*shared[:4], 2, 2, 2, 2]),
    ):
        world.open(session_id, ALICE)
        run_turn(world, session_id, tokens)
    world.open(SessionId("stranger"), BOB)
    run_turn(world, SessionId("stranger"), shared)
    return world


def content_at(world: World, session_id: SessionId, index: int) -> PageContent:
    scrubber = PageScrubber()
    while True:
        content = look(scrubber, world)
        if (content.session_id, content.start) == (session_id, 4 * index):
            return content


def test_everybody_with_the_page_is_blamed_and_nobody_else() -> None:
    world = sharing_world()
    for index, expected in ((0, {A, B, C}), (1, {A, B}), (2, {A})):
        found = PageScrubber().attribute(world.cache, content_at(world, A, index))
        assert {violation.session_id for violation in found} == expected
        assert all(f"positions {4 * index} to" in violation.text for violation in found)


def test_what_others_share_before_it_is_looked_at_next() -> None:
    world = sharing_world()
    scrubber = PageScrubber()
    content = content_at(world, A, 2)
    assert not scrubber.has_rechecks
    for violation in scrubber.attribute(world.cache, content):
        assert violation.session_id is not None
        world.cache.quarantine(violation.session_id)
    pages = pages_of(world, B)[:2]
    for start, page in zip((0, 4), pages, strict=True):
        assert scrubber.has_rechecks
        suspect = look(scrubber, world)
        assert (suspect.start, suspect.pages) == (start, {POOL: page})
        assert suspect.session_id in {B, C}
    assert not scrubber.has_rechecks
    assert find_violations(world.cache, 2) == []


def test_a_suspect_that_nobody_holds_any_more_is_dropped() -> None:
    world = sharing_world()
    scrubber = PageScrubber()
    scrubber.attribute(world.cache, content_at(world, A, 2))
    for session_id in (A, B, C):
        world.cache.cool(session_id)
    assert look(scrubber, world).session_id == "stranger"
    assert not scrubber.has_rechecks


def test_a_page_that_nobody_has_is_nobodys_fault() -> None:
    world = sharing_world()
    content = content_at(world, B, 2)
    world.cache.close(B)
    (violation,) = PageScrubber().attribute(world.cache, content)
    assert violation.session_id is None
