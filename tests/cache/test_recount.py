"""A recount in slices: no false alarm while sessions come and go, nothing missed, and an end."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from cache.recount import Recount
from cache.session_cache import SessionAwareCache
from cache.types import Holder, SessionId
from tests.cache.kv_world import MIXTURES, NAMESPACES, POOL, Mixture, World, make_cache
from tests.cache.plain_turns import run_turn
from tests.cache.player import Player, act
from tests.cache.test_checker import BREAKS
from tests.cache.two_sessions import PROMPT
from tests.cache.work import count_calls


def recount_in_slices(
    cache: SessionAwareCache, num_units: int = 1, between: Callable[[], object] = lambda: None
) -> tuple[list[str], int]:
    """What a recount finds, and in how many slices."""
    recount, num_slices = Recount(cache), 1
    while not recount.advance(num_units):
        num_slices += 1
        between()
    recount.stop()
    return [violation.text for violation in recount.violations], num_slices


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_changes_between_slices_is_no_violation(page_size: int, mixture: Mixture) -> None:
    num_recounts = num_disturbed = 0
    for seed in range(2):
        player, random = Player(page_size, mixture=mixture), Random(seed)
        recount = Recount(player.world.cache)
        for _ in range(250):
            act(player, random)
            if recount.advance(random.choice((1, 2, 8))):
                assert recount.violations == []
                recount.stop()
                num_recounts += 1
                num_disturbed += recount.has_seen_changes
                recount = Recount(player.world.cache)
        player.world.close_everything()
        while not recount.advance(1):
            pass
        assert recount.violations == []
    assert num_disturbed > 20
    assert num_recounts > num_disturbed // 2


@pytest.mark.parametrize(
    ("damage", "text"),
    [(damage, text) for damage, text in BREAKS if text != "do not sum"],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_when_it_begins_is_found(
    world: World, damage: Callable[[SessionAwareCache], None], text: str
) -> None:
    damage(world.cache)
    found, num_slices = recount_in_slices(world.cache)
    assert num_slices > 3
    assert any(text in each for each in found), found


@pytest.mark.parametrize(
    ("damage", "text"),
    [(damage, text) for damage, text in BREAKS if text != "do not sum"],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_goes_wrong_meanwhile_is_found_by_this_or_the_next_recount(
    world: World, damage: Callable[[SessionAwareCache], None], text: str
) -> None:
    recount = Recount(world.cache)
    for _ in range(4):
        assert not recount.advance(1)
    damage(world.cache)
    while not recount.advance(1):
        pass
    found = [violation.text for violation in recount.violations]
    found += recount_in_slices(world.cache)[0]
    assert any(text in each for each in found), found


def test_a_recount_ends_although_something_changes_between_all_of_its_slices() -> None:
    cache = make_cache(4, num_pages=600, num_rows=40, max_context_len=400)
    for number in range(30):
        cache.open(SessionId(f"s{number}"), namespace=NAMESPACES[0])
        run_turn(cache, SessionId(f"s{number}"), [number % 3, number // 3, *PROMPT])
    num_turns = 0

    def talk() -> None:
        nonlocal num_turns
        run_turn(cache, SessionId(f"s{num_turns % 7}"), [1, 2, 0])
        num_turns += 1

    found, num_quiet = recount_in_slices(cache, 4)
    assert found == []
    found, num_slices = recount_in_slices(cache, 4, talk)
    assert found == []
    assert num_slices <= num_quiet + 2


def test_a_recount_beside_evictions_ends_no_later_than_a_quiet_one() -> None:
    def make_tree() -> SessionAwareCache:
        cache = make_cache(4, num_pages=2000, num_rows=2, max_context_len=40)
        for number in range(300):
            cache.open(SessionId("s"), namespace=NAMESPACES[0])
            run_turn(cache, SessionId("s"), [number % 31, number // 31, *PROMPT])
            cache.close(SessionId("s"))
        return cache

    def evict() -> None:
        stores = cache.inspect().stores
        for pool, pages in stores.tree.evict(POOL, 8).items():
            stores.allocators[pool].release(pages, Holder.TREE)

    found, num_quiet = recount_in_slices(make_tree(), 4)
    assert found == []
    cache = make_tree()
    found, num_slices = recount_in_slices(cache, 4, evict)
    assert found == []
    assert num_slices <= num_quiet


@pytest.mark.parametrize("mixture", MIXTURES)
def test_what_a_slice_costs_does_not_grow_with_the_number_of_sessions(mixture: Mixture) -> None:
    def cost(num_sessions: int) -> int:
        cache = make_cache(
            4, num_pages=6 * num_sessions, num_rows=num_sessions, num_states=400, mixture=mixture
        )
        for number in range(num_sessions):
            name = SessionId(f"s{number}")
            cache.open(name, namespace=NAMESPACES[0])
            run_turn(cache, name, [number % 7, number // 7, *PROMPT])
        recount, calls, is_complete = Recount(cache), [0], False

        def advance() -> None:
            nonlocal is_complete
            is_complete = recount.advance(8)

        while not is_complete:
            calls.append(count_calls(advance))
        return max(calls)

    assert cost(120) < 1.2 * cost(30)


@pytest.mark.parametrize(("num_changed", "num_visits"), [(20, 20), (21, 21), (22, 21)])
def test_a_slice_visits_so_much_of_what_has_changed(
    monkeypatch: pytest.MonkeyPatch, num_changed: int, num_visits: int
) -> None:
    monkeypatch.setattr("cache.recount.MAX_CHANGED", 20)
    cache = make_cache(4)
    for number in range(30):
        cache.open(SessionId(f"s{number}"), namespace=NAMESPACES[0])
    recount, visited = Recount(cache), list[SessionId]()
    recount.advance(30)
    visit = recount._visit_session
    monkeypatch.setattr(recount, "_visit_session", lambda name: visited.append(name) or visit(name))
    for number in range(num_changed):
        cache.rewind(SessionId(f"s{number}"), 0)
    recount.advance(1)
    assert len(visited) == num_visits


@pytest.mark.parametrize(("num_sessions", "num_slices"), [(15, 1), (16, 1), (17, 2)])
def test_records_are_dropped_in_slices(
    monkeypatch: pytest.MonkeyPatch, num_sessions: int, num_slices: int
) -> None:
    cache = make_cache(4, num_pages=600, num_rows=num_sessions)
    for number in range(num_sessions):
        cache.open(SessionId(f"s{number}"), namespace=NAMESPACES[0])
        run_turn(cache, SessionId(f"s{number}"), PROMPT)
    recount, num_left = Recount(cache), list[int]()
    drop = recount._drop_records
    monkeypatch.setattr(
        recount, "_drop_records", lambda most: num_left.append(len(recount._leases)) or drop(most)
    )
    while not recount.advance(1):
        pass
    assert num_left == [num_sessions, num_sessions - 16][:num_slices]


def test_what_a_slice_costs_does_not_grow_with_the_edges_of_a_path() -> None:
    def cost(num_sessions: int) -> int:
        cache = make_cache(4, num_pages=400, num_rows=num_sessions + 2, max_context_len=400)
        path = [number % 31 for number in range(160)]
        for number in range(1, 40):
            name = SessionId(f"branch{number}")
            cache.open(name, namespace=NAMESPACES[0])
            run_turn(cache, name, [*path[: 4 * number], *[99] * 5])
            cache.close(name)
        for number in range(num_sessions):
            cache.open(SessionId(f"s{number}"), namespace=NAMESPACES[0])
            run_turn(cache, SessionId(f"s{number}"), [*path, 1])
        recount = Recount(cache)
        return count_calls(lambda: recount.advance(8))

    assert cost(8) < 1.2 * cost(2)


def test_books_that_are_begun_anew_end_a_recount(world: World) -> None:
    recount = Recount(world.cache)
    assert not recount.advance(1)
    world.cache.inspect().stores.ledgers[POOL].num_pages += 1
    world.cache.rebuild()
    assert recount.advance(1)
    assert recount.violations == []


@pytest.fixture
def world() -> World:
    """One parked and one lent session, each with a published edge and a private page."""
    world = World(make_cache(4), 4)
    for number, session_id in enumerate((SessionId("parked"), SessionId("lent"))):
        world.open(session_id, NAMESPACES[0])
        world.begin(session_id, [number] * 6)
        world.step(session_id, 64)
    world.end(SessionId("parked"), 7)
    return world
