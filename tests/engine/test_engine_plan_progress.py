"""Worlds of turns that live by the planner's plans: feasible, and progress for all that fit."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.types import SessionId, TurnId, pages_for
from session_server.engine.plan import StepPlan, plan_step
from session_server.engine.scheduler_view import Limits
from session_server.engine.shortage import PoolPages
from tests.depth import at_depth
from tests.engine.plan_views import FakeIdle, FakeRunning, FakeView, in_line


@dataclass(frozen=True)
class WorldPool:
    """A pool by count. Where a window passes, a turn keeps `kept_pages`; None keeps all."""

    num_pages: int
    kept_pages: int | None = None

    def held(self, num_pages: int) -> int:
        """What is kept of so many pages of a row."""
        return num_pages if self.kept_pages is None else min(num_pages, self.kept_pages)

    def room(self, num_pages: int, ahead_pages: int) -> int:
        """What a turn takes at a time to add so many pages to its row."""
        if self.kept_pages is None:
            return num_pages
        return min(num_pages, self.kept_pages + ahead_pages)


@dataclass
class WorldTurn:
    """A turn of the workload: `total` positions, all distinct but for a shared prefix."""

    name: str
    total: int
    shared: int
    computed: int = 0
    row_pages: int = 0
    is_running: bool = False
    is_done: bool = False


@dataclass(frozen=True)
class WorldIdle:
    """A parked session: pages it reports, and `hidden` ones that it shares with the others."""

    name: str
    pages: PoolPages
    hidden: PoolPages


@dataclass
class World:
    """Turns, idle sessions and pools."""

    pools: tuple[WorldPool, ...]
    num_rows: int
    limits: Limits
    turns: list[WorldTurn]
    idle: list[WorldIdle]
    reached: Counter[str] = field(default_factory=Counter)

    @property
    def headroom(self) -> PoolPages:
        """Pages nobody holds, per pool."""
        left = []
        for index, pool in enumerate(self.pools):
            hidden = max((idle.hidden[index] for idle in self.idle), default=0)
            held = sum(pool.held(turn.row_pages) for turn in self.turns if turn.is_running)
            left.append(pool.num_pages - held - hidden - sum(i.pages[index] for i in self.idle))
        return tuple(left)

    @property
    def ahead_pages(self) -> int:
        """Pages that one forward may add to a row."""
        return pages_for(self.limits.num_tokens, self.limits.page_size) + 1

    def view(self) -> FakeView:
        """What the planner sees."""
        live = [t for t in self.turns if t.is_running]
        queue = [t for t in self.turns if not (t.is_running or t.is_done)]
        return FakeView(
            running=tuple(map(self._running, live)),
            waiting=tuple(in_line(t.name, self._need(t), self._room(self._soon(t))) for t in queue),
            idle_sessions=tuple(FakeIdle(SessionId(i.name), i.pages) for i in self.idle),
            headroom_pages=self.headroom,
            num_free_rows=self.num_rows - len(live) - len(self.idle),
        )

    def _running(self, turn: WorldTurn) -> FakeRunning:
        spare = turn.row_pages * self.limits.page_size - turn.computed
        missing = pages_for(max(0, self._need(turn) - spare), self.limits.page_size)
        return FakeRunning(
            TurnId(turn.name),
            self._need(turn),
            spare,
            held_pages=tuple(pool.held(turn.row_pages) for pool in self.pools),
            promised_pages=self._room(missing),
        )

    def _room(self, num_pages: int) -> PoolPages:
        return tuple(pool.room(num_pages, self.ahead_pages) for pool in self.pools)

    def _soon(self, turn: WorldTurn) -> int:
        page_size = self.limits.page_size
        return pages_for(min(self._need(turn) + page_size, turn.total), page_size)

    @staticmethod
    def _need(turn: WorldTurn) -> int:
        """The prompt at once, then one position at a time."""
        return turn.shared - turn.computed if turn.computed < turn.shared else 1

    def apply(self, plan: StepPlan) -> None:
        """Do what a plan says, and settle it."""
        by_name = {t.name: t for t in self.turns}
        assert plan.refuse is None, "everybody fits alone"
        self._check_coolings(plan)
        self.idle = [idle for idle in self.idle if idle.name not in plan.cool]
        for name in plan.retract:
            turn = by_name[name]
            turn.computed, turn.row_pages, turn.is_running = 0, 0, False
            self.reached["retract"] += 1
        for name in plan.admit:
            assert not by_name[name].is_running
            by_name[name].is_running = True
        left = list(self.headroom)
        for work in plan.work:
            turn = by_name[work.turn_id]
            assert turn.is_running
            assert 0 < work.num_tokens <= self._need(turn)
            turn.computed += work.num_tokens
            grown = max(0, pages_for(turn.computed, self.limits.page_size) - turn.row_pages)
            turn.row_pages += grown
            left = [num - grown for num in left]
            self.reached.update(f"pool {i} is full" for i, num in enumerate(left) if num == 0)
        assert min(left) >= 0, "a plan overdrew"
        assert len([t for t in self.turns if t.is_running]) <= self.limits.num_turns
        assert sum(t.is_running for t in self.turns) + len(self.idle) <= self.num_rows
        for turn in self.turns:
            if turn.is_running and turn.computed == turn.total:
                turn.is_running, turn.is_done = False, True
                pages = tuple(pool.held(turn.row_pages) for pool in self.pools)
                self.idle.append(WorldIdle(turn.name, pages, (0,) * len(self.pools)))

    def _check_coolings(self, plan: StepPlan) -> None:
        self.reached["cool"] += len(plan.cool)
        for idle in self.idle:
            is_spared = idle.name not in plan.cool
            older_than = [i.name for i in self.idle[self.idle.index(idle) + 1 :]]
            if is_spared and any(name in plan.cool for name in older_than):
                self.reached["spared"] += 1
                assert len(self.pools) > 1, "one pool takes from the least recently used"


def make_world(seed: int, reached: Counter[str], *, num_pools: int) -> World:
    """Turns that fit alone, and idle sessions that hold up to everything."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    limits = Limits(rng.choice([1, 7, 64]), rng.randrange(1, 9), page_size)
    pools = [WorldPool(rng.randrange(4, 40))]
    if num_pools == 2:
        kept = rng.randrange(1, 5)
        needed = kept + pages_for(limits.num_tokens, page_size) + 1
        pools.append(WorldPool(needed + rng.randrange(0, 12), kept))
    most = pools[0].num_pages * page_size
    turns = []
    for i in range(rng.randrange(1, 14)):
        total = rng.randint(1, most) if rng.random() < 0.5 else rng.randint(1, max(1, most // 8))
        turns.append(WorldTurn(f"t{i}", total, rng.randint(1, total)))
    rooms, idle = [pool.num_pages for pool in pools], list[WorldIdle]()
    for i in range(rng.randrange(4)):
        hidden = [rng.randrange(0, room + 1) for room in rooms] if i == 0 else idle[0].hidden
        counts = []
        for index, room in enumerate(rooms):
            counts.append(rng.randrange(0, max(1, room - hidden[index])))
            rooms[index] -= counts[-1]
        idle.append(WorldIdle(f"idle{i}", tuple(counts), tuple(hidden)))
    num_rows = max(len(idle), rng.randrange(1, 12))
    return World(tuple(pools), num_rows, limits, turns, idle, reached)


@pytest.mark.parametrize("num_pools", [1, 2])
def test_every_turn_that_fits_alone_finishes_and_no_plan_overdraws(num_pools: int) -> None:
    reached: Counter[str] = Counter()
    for seed in range(at_depth(200, proof=400)):
        world = make_world(seed, reached, num_pools=num_pools)
        num_quiet = 0
        for _ in range(40_000):
            if all(t.is_done for t in world.turns):
                break
            plan = plan_step(world.view(), world.limits)
            world.apply(plan)
            num_quiet = 0 if plan.work else num_quiet + 1
            assert num_quiet <= 3, f"seed {seed}: nobody proceeds"
        assert all(t.is_done for t in world.turns), f"seed {seed}: not everybody finished"
    assert reached["retract"] > 100
    assert reached["cool"] > 100
    assert all(reached[f"pool {index} is full"] > 100 for index in range(num_pools))
    assert (reached["spared"] > 20) == (num_pools > 1)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32), num_pools=st.integers(1, 2))
def test_a_plan_is_a_function_of_its_view(seed: int, num_pools: int) -> None:
    world = make_world(seed, Counter(), num_pools=num_pools)
    view = world.view()
    assert plan_step(view, world.limits) == plan_step(view, world.limits)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_pool_that_has_enough_changes_no_plan(seed: int) -> None:
    """Beside one with room for everybody, a pool is planned as if it were alone."""
    world = make_world(seed, Counter(), num_pools=1)
    roomy = World(
        (*world.pools, WorldPool(10_000)),
        world.num_rows,
        world.limits,
        world.turns,
        [WorldIdle(i.name, i.pages * 2, i.hidden * 2) for i in world.idle],
    )
    assert plan_step(roomy.view(), world.limits) == plan_step(world.view(), world.limits)
