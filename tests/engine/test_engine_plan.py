"""The planner over frozen views: feasible plans, progress for everybody who fits alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cache.types import SessionId, TurnId, pages_for
from session_server.engine.plan import (
    MAX_OVERTAKINGS,
    AdmissionQuote,
    BlockReason,
    Limits,
    StepPlan,
    plan_step,
)


@dataclass(frozen=True)
class FakeRunning:
    turn_id: TurnId
    num_uncomputed: int
    num_spare: int = 0
    num_held_pages: int = 0
    num_drafts: int = 0


@dataclass(frozen=True)
class FakeWaiting:
    turn_id: TurnId
    session_id: SessionId
    price: AdmissionQuote
    num_overtakings: int = 0

    def quote(self) -> AdmissionQuote:
        return self.price


@dataclass(frozen=True)
class FakeIdle:
    session_id: SessionId
    num_pages: int


@dataclass(frozen=True)
class FakeView:
    running: tuple[FakeRunning, ...] = ()
    waiting: tuple[FakeWaiting, ...] = ()
    idle_sessions: tuple[FakeIdle, ...] = ()
    num_headroom_pages: int = 0
    num_free_rows: int = 8
    is_in_flight: bool = False

    @property
    def idle(self) -> Iterator[FakeIdle]:
        return iter(self.idle_sessions)


LIMITS = Limits(num_tokens=16, num_turns=8, page_size=4)


def running(name: str, num_uncomputed: int, spare: int = 0, held: int = 0) -> FakeRunning:
    return FakeRunning(TurnId(name), num_uncomputed, spare, held)


def waiting(name: str, num_uncomputed: int, *, context: int | None = None) -> FakeWaiting:
    room = num_uncomputed if context is None else context
    quote = AdmissionQuote(num_uncomputed, room, 0, 0, needs_row=True)
    return FakeWaiting(TurnId(name), SessionId(f"of {name}"), quote)


def work_of(plan: StepPlan) -> dict[str, int]:
    return {work.turn_id: work.num_tokens for work in plan.work}


def test_a_turn_that_lacks_one_position_gets_it_whatever_the_budget() -> None:
    streams = tuple(running(f"d{i}", 1, spare=1) for i in range(6))
    hog = running("hog", 1000, spare=1000)
    plan = plan_step(FakeView(running=(hog, *streams)), structs.replace(LIMITS, num_tokens=2))
    assert work_of(plan) == {"hog": 2} | {f"d{i}": 1 for i in range(6)}


def test_a_hog_shares_its_forward_with_those_who_come_after_it() -> None:
    view = FakeView(
        running=(running("hog", 1000, spare=1000),),
        waiting=(waiting("short", 5), waiting("long", 500, context=12)),
        num_headroom_pages=50,
    )
    plan = plan_step(view, LIMITS)
    assert work_of(plan) == {"hog": 6, "short": 5, "long": 5}
    assert plan.admit == ("short", "long")


def test_behind_a_turn_that_waits_for_pages_only_those_come_that_are_soon_done() -> None:
    line = (waiting("big", 40), waiting("long", 17), waiting("short", 3), waiting("late", 2))
    view = FakeView(
        running=(running("r", 1, spare=1),), waiting=line, num_headroom_pages=2, num_free_rows=9
    )
    plan = plan_step(view, LIMITS)
    assert plan.blocked == ("big", BlockReason.PAGES)
    assert (plan.admit, plan.num_overtakings) == (("short", "late"), 2)


def test_a_turn_that_waits_for_pages_is_passed_only_so_often() -> None:
    big = replace(waiting("big", 40), num_overtakings=MAX_OVERTAKINGS - 1)
    view = FakeView(
        running=(running("r", 1, spare=1),),
        waiting=(big, waiting("one", 2), waiting("two", 2)),
        num_headroom_pages=9,
    )
    assert plan_step(view, LIMITS).admit == ("one",)
    tired = replace(big, num_overtakings=MAX_OVERTAKINGS)
    assert plan_step(replace(view, waiting=(tired, *view.waiting[1:])), LIMITS).admit == ()


def test_nobody_passes_when_nothing_runs_that_could_give_pages() -> None:
    view = FakeView(waiting=(waiting("big", 40), waiting("small", 1)), num_headroom_pages=9)
    plan = plan_step(replace(view, is_in_flight=True), LIMITS)
    assert plan.admit == ()
    assert plan.blocked == ("big", BlockReason.PAGES)


def test_long_turns_leave_half_of_the_places_to_those_that_are_soon_done() -> None:
    hogs = tuple(running(f"hog{i}", 1000, spare=1000) for i in range(4))
    line = (waiting("fifth", 1000, context=9), waiting("short", 2), waiting("sixth", 1000))
    view = FakeView(running=hogs, waiting=line, num_headroom_pages=99, num_free_rows=9)
    plan = plan_step(view, LIMITS)
    assert plan.admit == ("short",)
    assert plan.blocked == ("fifth", BlockReason.TOKENS)
    assert sum(work_of(plan).values()) == LIMITS.num_tokens


def test_a_turn_behind_more_long_ones_than_a_forward_serves_is_seen() -> None:
    line = (*(waiting(f"hog{i}", 1000, context=9) for i in range(7)), waiting("short", 2))
    view = FakeView(waiting=line, num_headroom_pages=999, num_free_rows=9)
    assert plan_step(view, LIMITS).admit == ("hog0", "hog1", "hog2", "hog3", "short")


def test_admission_cools_the_least_recently_used_and_never_retracts() -> None:
    idle = (FakeIdle(SessionId("old"), 2), FakeIdle(SessionId("new"), 2))
    view = FakeView(
        running=(running("r", 1, spare=1, held=50),),
        waiting=(waiting("w", 8), waiting("x", 100)),
        idle_sessions=idle,
    )
    plan = plan_step(view, LIMITS)
    assert plan.cool == ("old",)
    assert plan.admit == ("w",)
    assert plan.retract == ()


def test_a_waiting_turn_does_not_cool_its_own_session_for_itself() -> None:
    turn = waiting("w", 4)
    idle = (FakeIdle(turn.session_id, 3), FakeIdle(SessionId("other"), 3))
    plan = plan_step(FakeView(waiting=(turn,), idle_sessions=idle), LIMITS)
    assert plan.cool == ("other",)
    assert plan.admit == ("w",)


def test_a_turn_that_needs_a_row_cools_an_idle_session_for_it() -> None:
    idle = (FakeIdle(SessionId("old"), 0),)
    view = FakeView(
        waiting=(waiting("w", 4),), idle_sessions=idle, num_headroom_pages=9, num_free_rows=0
    )
    plan = plan_step(view, LIMITS)
    assert (plan.cool, plan.admit) == (("old",), ("w",))


def test_cooling_comes_before_retracting_and_the_youngest_goes_first() -> None:
    view = FakeView(
        running=(running("a", 1), running("b", 1, spare=1, held=3), running("c", 1, held=3)),
        idle_sessions=(FakeIdle(SessionId("s"), 0),),
    )
    plan = plan_step(view, LIMITS)
    assert plan.cool == ("s",)
    assert plan.retract == ("c",)
    assert work_of(plan) == {"a": 1, "b": 1}


def test_no_more_turns_give_way_than_it_takes() -> None:
    young = (running("b", 1, spare=1, held=3), running("c", 1, spare=1, held=3))
    plan = plan_step(FakeView(running=(running("a", 9), *young)), LIMITS)
    assert plan.retract == ("c",)
    assert work_of(plan) == {"a": 9, "b": 1}


def test_nothing_is_taken_in_vain() -> None:
    view = FakeView(
        running=(running("a", 1, spare=1), running("b", 40), running("c", 1, spare=1, held=2)),
        idle_sessions=(FakeIdle(SessionId("s"), 1),),
    )
    plan = plan_step(view, structs.replace(LIMITS, num_tokens=64))
    assert (plan.cool, plan.retract) == ((), ())
    assert work_of(plan) == {"a": 1, "c": 1}


def test_what_was_taken_for_the_oldest_turn_goes_to_nobody_who_waits() -> None:
    """Cooling may free more than was counted; with a newcomer in between it would be too little."""
    view = FakeView(
        running=(running("old", 40, held=1),),
        waiting=(waiting("short", 4),),
        idle_sessions=(FakeIdle(SessionId("s"), 2), FakeIdle(SessionId("t"), 1)),
    )
    plan = plan_step(view, structs.replace(LIMITS, num_tokens=64))
    assert (plan.cool, plan.admit, plan.work) == (("s", "t"), (), ())
    assert plan.blocked == ("short", BlockReason.SHORTAGE)


def test_two_long_prompts_do_not_evict_each_other_in_turns() -> None:
    first = running("first", 80, spare=0)
    view = FakeView(running=(first,), waiting=(waiting("second", 80),), num_headroom_pages=30)
    assert plan_step(view, LIMITS).blocked == ("second", BlockReason.PAGES)
    roomy = replace(view, num_headroom_pages=40)
    assert plan_step(roomy, LIMITS).admit == ("second",)


def test_a_short_turn_may_borrow_what_is_promised_to_a_long_one() -> None:
    view = FakeView(
        running=(running("hog", 80),), waiting=(waiting("short", 4),), num_headroom_pages=20
    )
    assert plan_step(view, LIMITS).admit == ("short",)


def test_a_turn_that_cannot_ever_proceed_is_named_and_not_left_hanging() -> None:
    view = FakeView(waiting=(waiting("w", 40),), num_headroom_pages=3)
    assert plan_step(view, LIMITS).refuse == "w"
    assert plan_step(replace(view, is_in_flight=True), LIMITS).refuse is None


def test_at_most_the_limit_of_turns_runs() -> None:
    view = FakeView(
        running=tuple(running(f"r{i}", 1, spare=1) for i in range(7)),
        waiting=(waiting("w1", 1), waiting("w2", 1)),
        num_headroom_pages=9,
    )
    plan = plan_step(view, LIMITS)
    assert plan.admit == ("w1",)
    assert plan.blocked == ("w2", BlockReason.TURNS)


def test_guesses_get_what_is_left_and_never_take_a_page() -> None:
    guessing = replace(running("g", 1, spare=2), num_drafts=6)
    first = replace(running("f", 1, spare=8), num_drafts=4)
    hog = running("hog", 30, spare=30)

    def drafts_of(view: FakeView, num_tokens: int = 64) -> dict[str, int]:
        plan = plan_step(view, structs.replace(LIMITS, num_tokens=num_tokens))
        assert (plan.cool, plan.retract) == ((), ())
        return {work.turn_id: work.num_drafts for work in plan.work if work.num_drafts}

    idle = (FakeIdle(SessionId("s"), 9),)
    short = FakeView(running=(first, guessing, hog), idle_sessions=idle)
    assert drafts_of(short) == {"f": 4, "g": 1}, "only into pages it has"
    assert drafts_of(replace(short, num_headroom_pages=2)) == {"f": 4, "g": 6}
    assert drafts_of(replace(short, num_headroom_pages=2), 37) == {"f": 4, "g": 3}
    assert drafts_of(replace(short, num_headroom_pages=2), 30) == {}, "prompts come first"


# A world of sessions that share prefixes, for progress


@dataclass
class WorldTurn:
    """A turn of the workload: `total` positions, all distinct but for a shared prefix."""

    name: str
    total: int
    shared: int
    computed: int = 0
    held: int = 0
    is_running: bool = False
    is_done: bool = False


@dataclass
class World:
    """Pages by count. Idle sessions may share `hidden` pages that nobody reports."""

    num_pages: int
    num_rows: int
    limits: Limits
    turns: list[WorldTurn]
    idle: list[tuple[str, int, int]]
    reached: Counter[str] = field(default_factory=Counter)

    @property
    def held(self) -> int:
        hidden = max((hidden for _, _, hidden in self.idle), default=0)
        return sum(t.held for t in self.turns) + sum(n for _, n, _ in self.idle) + hidden

    def view(self) -> FakeView:
        page_size = self.limits.page_size
        live = [t for t in self.turns if t.is_running]
        queue = [t for t in self.turns if not (t.is_running or t.is_done)]
        return FakeView(
            running=tuple(
                running(t.name, self._need(t), t.held * page_size - t.computed, t.held)
                for t in live
            ),
            waiting=tuple(
                waiting(t.name, self._need(t), context=min(self._need(t) + page_size, t.total))
                for t in queue
            ),
            idle_sessions=tuple(FakeIdle(SessionId(name), n) for name, n, _ in self.idle),
            num_headroom_pages=self.num_pages - self.held,
            num_free_rows=self.num_rows - len(live) - len(self.idle),
        )

    @staticmethod
    def _need(turn: WorldTurn) -> int:
        """The prompt at once, then one position at a time."""
        return turn.shared - turn.computed if turn.computed < turn.shared else 1

    def apply(self, plan: StepPlan) -> None:
        by_name = {t.name: t for t in self.turns}
        assert plan.refuse is None, "everybody fits alone"
        self.idle = [entry for entry in self.idle if entry[0] not in plan.cool]
        self.reached["cool"] += len(plan.cool)
        for name in plan.retract:
            turn = by_name[name]
            turn.computed, turn.held, turn.is_running = 0, 0, False
            self.reached["retract"] += 1
        for name in plan.admit:
            assert not by_name[name].is_running
            by_name[name].is_running = True
        for work in plan.work:
            turn = by_name[work.turn_id]
            assert turn.is_running
            assert 0 < work.num_tokens <= self._need(turn)
            turn.computed += work.num_tokens
            turn.held = max(turn.held, pages_for(turn.computed, self.limits.page_size))
        assert self.held <= self.num_pages, "a plan overdrew"
        assert len([t for t in self.turns if t.is_running]) <= self.limits.num_turns
        assert sum(t.is_running for t in self.turns) + len(self.idle) <= self.num_rows
        for turn in self.turns:
            if turn.is_running and turn.computed == turn.total:
                turn.is_running, turn.is_done = False, True
                self.idle.append((turn.name, turn.held, 0))
                turn.held = 0


def make_world(seed: int, reached: Counter[str]) -> World:
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 16])
    num_pages = rng.randrange(4, 40)
    most = num_pages * page_size
    turns = []
    for i in range(rng.randrange(1, 14)):
        total = rng.randint(1, most) if rng.random() < 0.5 else rng.randint(1, max(1, most // 8))
        turns.append(WorldTurn(f"t{i}", total, rng.randint(1, total)))
    idle, room = [], num_pages
    for i in range(rng.randrange(4)):
        hidden = rng.randrange(0, room + 1) if i == 0 else idle[0][2]
        count = rng.randrange(0, max(1, room - hidden))
        room -= count
        idle.append((f"idle{i}", count, hidden))
    limits = Limits(rng.choice([1, 7, 64]), rng.randrange(1, 9), page_size)
    return World(num_pages, max(len(idle), rng.randrange(1, 12)), limits, turns, idle, reached)


def test_every_turn_that_fits_alone_finishes_and_no_plan_overdraws() -> None:
    reached: Counter[str] = Counter()
    for seed in range(400):
        world = make_world(seed, reached)
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


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 32))
def test_a_plan_is_a_function_of_its_view(seed: int) -> None:
    world = make_world(seed, Counter())
    view = world.view()
    assert plan_step(view, world.limits) == plan_step(view, world.limits)
