"""Pages on their way out of the pools and back: nothing overwrites or evicts them, what comes in is
what went out, and the books balance at every moment, counted whole and in slices.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from cache.errors import OutOfPages
from cache.recount import Recount
from cache.session_cache import SessionAwareCache
from cache.transit import Transit
from cache.types import Holder, Namespace, PoolName, SessionId, SlotState, Tokens
from tests.cache.audit import audit
from tests.cache.kv_world import MIXTURES, NAMESPACES, STATE_POOL, Mixture, World, make_cache
from tests.cache.player import Player, act
from tests.cache.test_recount import recount_in_slices
from tests.cache.two_sessions import run_turn
from tests.depth import at_depth

A, B, C = SessionId("a"), SessionId("b"), SessionId("c")
ALICE, BOB = NAMESPACES
PROMPT = [1, 2, 0, 1, 2, 2, 1, 0, 0, 1] * 2
FAR = 10**6

Cells = dict[PoolName, np.ndarray]
Key = tuple[Namespace, tuple[int, ...]]


@dataclass(frozen=True)
class UpTo:
    """Everything up to a length could come in."""

    end: int

    def longest_len(self, start: int) -> int:
        return self.end

    def is_worth(self, start: int, end: int) -> bool:
        return True


def make_world(mixture: Mixture, page_size: int = 4, num_pages: int = 33) -> World:
    """A has two turns behind it."""
    world = World(make_cache(page_size, mixture=mixture, num_pages=num_pages), page_size)
    for session_id in (A, B):
        world.open(session_id, ALICE)
    run_turn(world, A, PROMPT)
    run_turn(world, A, [2, 2, 0])
    return world


def check(cache: SessionAwareCache) -> None:
    """The books balance, and a recount in slices says so too."""
    audit(cache)
    assert recount_in_slices(cache)[0] == []


def published(world: World, session_id: SessionId) -> Tokens:
    """The tokens of a session that the tree has."""
    return world.cache.tokens(session_id, 0, world.cache.slot(session_id).protected_len)


def begin_out(world: World, session_id: SessionId) -> Transit:
    """Begin to copy all that a session has published."""
    transit = world.cache.copies.begin_out(ALICE, published(world, session_id), 0, FAR)
    assert transit is not None
    return transit


def cells_of(world: World, transit: Transit) -> Cells:
    """What the pages of a copy hold."""
    return {p: world.device.tags[p][each.pages].copy() for p, each in transit.pages.items()}


def fill(world: World, transit: Transit, cells: Cells) -> None:
    """Write the pages of a copy."""
    for pool, each in transit.pages.items():
        world.device.tags[pool][each.pages] = cells[pool]


def evict_all(world: World) -> None:
    """Free every published page that nobody has locked."""
    stores = world.cache.inspect().stores
    for pool, ledger in stores.ledgers.items():
        stores.evict(pool, ledger.num_evictable)


def spilled(world: World) -> tuple[Tokens, Cells]:
    """Copy what A has out of the pools, and leave nothing of it there."""
    tokens, transit = published(world, A), begin_out(world, A)
    cells = cells_of(world, transit)
    assert world.cache.copies.end_out(transit)
    world.cool(A)
    evict_all(world)
    assert world.cache.peek(tokens, ALICE).matched_len == 0
    return tokens, cells


def begin_in(world: World, tokens: Tokens) -> Transit:
    """Begin to copy it back."""
    transit = world.cache.copies.begin_in(ALICE, tokens, UpTo(len(tokens)))
    assert transit is not None
    return transit


# Out and back


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_what_went_out_comes_back_and_is_gone_on_from(page_size: int, mixture: Mixture) -> None:
    world = make_world(mixture, page_size, num_pages=65)
    tokens = published(world, A)
    out = begin_out(world, A)
    assert world.cache.copies.num_under_way == 1
    check(world.cache)
    cells = cells_of(world, out)
    world.cool(A)
    evict_all(world)
    check(world.cache)
    assert all(map(np.array_equal, cells_of(world, out).values(), cells.values()))
    assert world.cache.copies.end_out(out)
    evict_all(world)
    check(world.cache)
    assert all(accounts.free == accounts.pages - 1 for accounts in world.cache.accounts().values())

    coming = begin_in(world, tokens)
    for pool, each in coming.pages.items():
        assert world.cache.inspect().stores.ledgers[pool].snapshot().spill == len(each.pages)
        assert len(each.pages) == len(cells[pool])
    check(world.cache)
    fill(world, coming, cells)
    assert world.cache.copies.end_in(coming, is_whole=True)
    assert world.cache.copies.num_under_way == 0
    check(world.cache)
    assert run_turn(world, A, [1, 1]) >= len(tokens) - page_size
    world.close_everything()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_copy_that_failed_gives_everything_back(mixture: Mixture) -> None:
    world = make_world(mixture)
    tokens, _ = spilled(world)
    before = world.fingerprint()
    coming = begin_in(world, tokens)
    assert world.fingerprint() != before
    assert not world.cache.copies.end_in(coming, is_whole=False)
    assert world.fingerprint()[0] == before[0]
    check(world.cache)
    assert run_turn(world, A, [1, 1]) == 0
    world.close_everything()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_without_pages_nothing_is_changed(mixture: Mixture) -> None:
    world = make_world(mixture, num_pages=13)
    tokens, _ = spilled(world)
    world.begin(B, list(reversed(PROMPT)) + [0] * 14)
    world.step(B, 64)
    before = world.fingerprint()
    stores = world.cache.inspect().stores
    taken = {p: each.acquire(each.ledger.num_free, Holder.ACTIVE) for p, each in
             stores.allocators.items()}  # fmt: skip
    with pytest.raises(OutOfPages):
        begin_in(world, tokens)
    for pool, pages in taken.items():
        stores.allocators[pool].release(pages, Holder.ACTIVE)
    assert world.fingerprint() == before
    assert world.cache.copies.num_under_way == 0
    check(world.cache)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_of_what_is_there_nothing_comes_in(mixture: Mixture) -> None:
    world = make_world(mixture)
    tokens = published(world, A)
    before = world.fingerprint()
    assert world.cache.copies.begin_in(ALICE, tokens, UpTo(len(tokens))) is None
    assert world.cache.copies.begin_in(BOB, tokens, UpTo(0)) is None
    assert world.cache.copies.begin_out(ALICE, tokens, len(tokens), FAR) is None
    assert world.cache.copies.begin_out(BOB, tokens, 0, FAR) is None
    assert world.fingerprint()[:3] == before[:3]
    check(world.cache)
    world.close_everything()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_what_somebody_has_computed_meanwhile_is_kept_once(mixture: Mixture) -> None:
    world = make_world(mixture)
    history = list(world.histories[A])
    tokens, cells = spilled(world)
    coming = begin_in(world, tokens)
    fill(world, coming, cells)
    world.open(C, ALICE)
    run_turn(world, C, history)
    check(world.cache)
    num_free = {p: each.free for p, each in world.cache.accounts().items()}
    assert world.cache.copies.end_in(coming, is_whole=True)
    check(world.cache)
    for pool, each in coming.pages.items():
        given_back = world.cache.accounts()[pool].free - num_free[pool]
        assert 0 < given_back <= len(each.pages) or pool == STATE_POOL
    world.check()
    run_turn(world, A, [1])
    world.close_everything()


# Locks


@pytest.mark.parametrize("mixture", MIXTURES)
def test_pages_on_their_way_out_are_neither_evicted_nor_written(mixture: Mixture) -> None:
    world = make_world(mixture, num_pages=12 if mixture == "window" else 33)
    out = begin_out(world, A)
    cells = cells_of(world, out)
    world.close(A)
    for number in range(8):
        session_id = SessionId(f"other {number}")
        world.open(session_id, ALICE)
        run_turn(world, session_id, [number % 3, number // 3, *PROMPT])
        world.cool(session_id)
    assert world.marks["eviction"] > 0
    check(world.cache)
    assert all(map(np.array_equal, cells_of(world, out).values(), cells.values()))
    assert world.cache.copies.end_out(out)
    check(world.cache)
    world.close_everything()


# A rebuild or a quarantine meanwhile


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("num_rebuilds", [1, 2])
def test_what_a_copy_still_writes_is_nobodys_until_it_has_ended(
    mixture: Mixture, num_rebuilds: int
) -> None:
    world = make_world(mixture)
    tokens, cells = spilled(world)
    coming = begin_in(world, tokens)
    for _ in range(num_rebuilds):
        world.cache.rebuild()
        check(world.cache)
    stores = world.cache.inspect().stores
    for pool, each in coming.pages.items():
        ledger, allocator = stores.ledgers[pool], stores.allocators[pool]
        assert ledger.snapshot().fenced == len(each.pages)
        taken = allocator.acquire(ledger.num_free, Holder.ACTIVE)
        assert set(taken).isdisjoint(each.pages.tolist())
        assert len(taken) == ledger.num_pages - 1 - len(each.pages)
        allocator.release(taken, Holder.ACTIVE)
    fill(world, coming, cells)
    assert not world.cache.copies.end_in(coming, is_whole=True), "nothing of before is trusted"
    check(world.cache)
    assert all(accounts.free == accounts.pages - 1 for accounts in world.cache.accounts().values())
    assert world.cache.peek(tokens, ALICE).matched_len == 0
    assert not world.cache.copies.end_in(coming, is_whole=True)
    assert run_turn(world, A, [1]) == 0


@pytest.mark.parametrize("how", ["rebuild", "quarantine of it", "quarantine of another"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_copy_on_its_way_out_is_void_after_damage(mixture: Mixture, how: str) -> None:
    world = make_world(mixture)
    run_turn(world, B, [0, *PROMPT])
    out = begin_out(world, A)
    if how == "rebuild":
        world.cache.rebuild()
    else:
        world.quarantine(A if how == "quarantine of it" else B)
    check(world.cache)
    assert world.cache.copies.num_under_way == 0
    assert not world.cache.copies.end_out(out)
    check(world.cache)
    # Its number is never that of another copy.
    run_turn(world, B, [1, 2, 2])
    again = begin_out(world, B)
    assert again.number > out.number
    assert not world.cache.copies.end_out(out)
    assert world.cache.copies.end_out(again)
    check(world.cache)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_quarantine_leaves_what_comes_in_alone(mixture: Mixture) -> None:
    world = make_world(mixture)
    tokens, cells = spilled(world)
    coming = begin_in(world, tokens)
    run_turn(world, B, [0, *PROMPT])
    world.quarantine(B)
    check(world.cache)
    fill(world, coming, cells)
    assert world.cache.copies.end_in(coming, is_whole=True)
    check(world.cache)
    assert run_turn(world, A, [1]) > 0


# At any moment


@dataclass
class Copier:
    """Begins and ends copies at random beside a player; what comes in is what once went out."""

    player: Player
    random: Random
    marks: Counter[str] = field(default_factory=Counter)
    shelf: dict[Key, Cells] = field(default_factory=dict)
    out: list[tuple[Transit, Key, Cells]] = field(default_factory=list)
    coming: list[tuple[Transit, Key]] = field(default_factory=list)

    def act(self) -> None:
        """One action."""
        actions = [self.begin_out, self.begin_in, self.end_out, self.end_in]
        self.random.choice(actions)()

    def begin_out(self) -> None:
        world = self.player.world
        session_id = self.random.choice(sorted(world.histories) or [A])
        if len(self.out) > 1 or session_id not in world.histories:
            return
        namespace, tokens = world.namespaces[session_id], world.cache.tokens(session_id)
        transit = world.cache.copies.begin_out(namespace, tokens, 0, FAR)
        if transit is not None:
            key = (namespace, tuple(tokens[: transit.end].tolist()))
            self.out.append((transit, key, cells_of(world, transit)))

    def end_out(self) -> None:
        if self.out:
            transit, key, cells = self.out.pop(self.random.randrange(len(self.out)))
            if not self.player.world.cache.copies.end_out(transit):
                self.marks["voided"] += 1
                return
            now = cells_of(self.player.world, transit)
            assert all(map(np.array_equal, now.values(), cells.values())), "overwritten"
            self.shelf[key] = cells
            self.marks["out"] += 1

    def begin_in(self) -> None:
        world = self.player.world
        if not self.shelf or len(self.coming) > 1:
            return
        namespace, tokens = key = self.random.choice(list(self.shelf))
        path = np.array(tokens, np.int32)
        try:
            transit = world.cache.copies.begin_in(namespace, path, UpTo(len(path)))
        except OutOfPages:
            self.marks["no room"] += 1
            return
        if transit is not None:
            self.coming.append((transit, key))

    def end_in(self) -> None:
        if not self.coming:
            return
        transit, key = self.coming.pop(self.random.randrange(len(self.coming)))
        world, is_whole = self.player.world, self.random.random() < 0.8
        for pool, each in transit.pages.items():
            num_pages, last = len(key[1]) // world.page_size, each.end
            assert last == num_pages
            cells = self.shelf[key][pool]
            world.device.tags[pool][each.pages] = cells[len(cells) - len(each.pages) :]
        self.marks["in"] += world.cache.copies.end_in(transit, is_whole=is_whole)
        self.marks["failed"] += not is_whole

    def end_all(self) -> None:
        """Let nothing be under way."""
        while self.out or self.coming:
            self.end_out()
            self.end_in()


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_copies_may_begin_and_end_at_any_moment(page_size: int, mixture: Mixture) -> None:
    marks: Counter[str] = Counter()
    for seed in range(at_depth(2, proof=100)):
        random = Random(seed)
        player = Player(page_size, mixture=mixture)
        copier = Copier(player, random, marks)
        recount, num_recounts = Recount(player.world.cache), 0
        for _ in range(250):
            act(player, random)
            copier.act()
            player.world.check()
            if recount.advance(random.choice((1, 4, 16))):
                assert recount.violations == []
                recount.stop()
                num_recounts += 1
                recount = Recount(player.world.cache)
        assert num_recounts > 1
        copier.end_all()
        player.world.close_everything()
        check(player.world.cache)
    assert min(marks["out"], marks["in"], marks["failed"]) > 3, marks


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_session_whose_pages_come_in_stays_cold_until_they_are_there(mixture: Mixture) -> None:
    world = make_world(mixture)
    tokens, cells = spilled(world)
    coming = begin_in(world, tokens)
    assert world.cache.slot(A).state is SlotState.COLD
    assert world.cache.peek(tokens, ALICE).matched_len == 0
    fill(world, coming, cells)
    assert world.cache.copies.end_in(coming, is_whole=True)
    more = np.append(tokens, np.int32(0))
    assert world.cache.peek(more, ALICE).matched_len == len(tokens)
    assert world.cache.peek(more, BOB).matched_len == 0
