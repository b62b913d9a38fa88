"""What a plan costs does not grow with the sessions that rest or the turns that wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cache.radix_node import MatchResult
from cache.session_cache import SessionAwareCache
from cache.types import SessionId, TurnId
from session_server.core.commands import CloseSession
from session_server.engine.config import MemoryCheck
from session_server.engine.plan import plan_step
from session_server.engine.plan_budget import MAX_COOLED
from session_server.engine.scheduler_view import BlockReason
from session_server.engine.shortage import ReclaimableTotal
from tests.cache.work import count_calls
from tests.engine.bench import Bench
from tests.engine.plan_views import (
    LIMITS,
    FakeIdle,
    FakeRunning,
    FakeView,
    running,
    waiting,
)
from tests.sim.hand_engine import Sizes


@dataclass(frozen=True)
class AskedView(FakeView):
    """Counts the idle sessions that a plan asks, and how often it sums them up."""

    asked: list[SessionId] = field(default_factory=list)
    sums: list[ReclaimableTotal] = field(default_factory=list)

    @property
    def idle_total(self) -> ReclaimableTotal:
        self.sums.append(super().idle_total)
        return self.sums[-1]

    @property
    def idle(self) -> Iterator[FakeIdle]:
        for session in self.idle_sessions:
            self.asked.append(session.session_id)
            yield session


IDLE = tuple(FakeIdle(SessionId(f"idle{number}"), (1,)) for number in range(50))


def test_a_turn_that_all_idle_sessions_together_do_not_help_asks_none_of_them() -> None:
    view = AskedView(
        running=(running("r", 1, spare=1),),
        waiting=(waiting("big", 400),),
        idle_sessions=IDLE,
        headroom_pages=(2,),
    )
    plan = plan_step(view, LIMITS)
    assert plan.blocked == ("big", BlockReason.PAGES)
    assert view.asked == []


def test_a_running_turn_that_nobody_can_help_asks_nobody() -> None:
    short = FakeRunning(TurnId("short"), 400, held_pages=(3,))
    view = AskedView(
        running=(running("oldest", 1, spare=1), short, running("young", 1, spare=1)),
        idle_sessions=IDLE[:1],
        headroom_pages=(0,),
    )
    plan = plan_step(view, LIMITS)
    assert plan.retract == ()
    assert view.asked == []


def test_however_many_turns_lack_pages_a_plan_sums_up_once_what_is_idle() -> None:
    """A sum costs O(tenants with idle sessions)."""
    short = tuple(FakeRunning(TurnId(f"short{number}"), 400) for number in range(6))
    first = running("oldest", 1, spare=1)
    view = AskedView(running=(first, *short), idle_sessions=IDLE[:1])
    plan_step(view, LIMITS)
    assert len(view.sums) == 1
    view = AskedView(running=(first, *(running(f"r{n}", 4, held=9) for n in range(6))))
    plan = plan_step(replace(view, idle_sessions=IDLE[:3]), LIMITS)
    assert len(view.sums) == 1
    assert plan.cool == ("idle0", "idle1", "idle2")


def test_who_can_be_helped_asks_as_many_as_it_takes() -> None:
    view = AskedView(
        running=(running("r", 1, spare=1),),
        waiting=(waiting("t", 20),),
        idle_sessions=IDLE,
        headroom_pages=(2,),
    )
    plan = plan_step(view, LIMITS)
    assert plan.admit == ("t",)
    assert list(plan.cool) == view.asked == ["idle0", "idle1", "idle2"]


@pytest.mark.parametrize("num_missing", [MAX_COOLED - 1, MAX_COOLED, MAX_COOLED + 1])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_plan_cools_so_many_and_the_next_goes_on(num_missing: int, is_alone: bool) -> None:
    idle = tuple(FakeIdle(SessionId(f"idle{number}"), (1,)) for number in range(4 * MAX_COOLED))
    view = AskedView(
        running=() if is_alone else (running("r", 1, spare=1),),
        waiting=(waiting("big", 4 * num_missing),),
        idle_sessions=idle,
    )
    plan = plan_step(view, LIMITS)
    assert len(plan.cool) == len(view.asked) == min(num_missing, MAX_COOLED)
    if num_missing <= MAX_COOLED:
        assert plan.admit == ("big",)
        return
    view = replace(view, waiting=(*view.waiting, waiting("small", 1)))
    plan = plan_step(view, LIMITS)
    assert (plan.blocked, plan.admit) == (("big", BlockReason.PAGES), ())
    assert (plan.is_denial, plan.refuse) == (False, None)
    later = replace(view, idle_sessions=idle[MAX_COOLED:], headroom_pages=(MAX_COOLED,))
    assert plan_step(later, LIMITS).admit == ("big", "small")


def test_a_running_turn_retracts_nobody_while_a_plan_cools_only_some() -> None:
    sharing = tuple(FakeIdle(SessionId(f"idle{number}"), (0,)) for number in range(2 * MAX_COOLED))
    turns = tuple(running(f"r{number}", 1, held=9) for number in range(3))
    plan = plan_step(FakeView(running=turns, idle_sessions=sharing), LIMITS)
    assert plan.retract == ()
    assert len(plan.cool) == MAX_COOLED + 1
    plan = plan_step(FakeView(running=turns, idle_sessions=sharing[:3]), LIMITS)
    assert plan.retract == ("r2",)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_step_beside_a_turn_that_waits_for_pages_costs_the_same_with_many_at_rest(
    page_size: int,
) -> None:
    def cost(num_parked: int) -> int:
        sizes = Sizes(
            num_pages=(num_parked * 12 + 140) // page_size,
            page_size=page_size,
            num_rows=num_parked + 8,
            max_context_len=5000,
            memory_check=MemoryCheck.WARN,
        )
        bench = Bench(sizes)
        for number in range(num_parked):
            name = bench.open(f"s{number}")
            tokens = (number % 31, number // 31, 1, 2, 3)
            bench.run(bench.submit_command(name, f"t{number}", tokens, max_tokens=1))
        bench.open("runs")
        prompt = tuple(range(1, 31)) * 2
        bench.step(bench.submit_command(SessionId("runs"), "run", prompt, max_tokens=60))
        bench.open("waits")
        num_tokens = bench.engine.max_turn_len - 20
        tokens = tuple(number % 31 for number in range(num_tokens))
        bench.step(bench.submit_command(SessionId("waits"), "wait", tokens, max_tokens=1))
        for _ in range(8):
            bench.settle()
        assert bench.engine.inspect().scheduler.waiting
        step = bench.runner.execute()
        return count_calls(lambda: bench.engine.step(99.0, (), (step,)))

    assert cost(40) == pytest.approx(cost(10), rel=0.05)


def crowded(num_waiting: int) -> Bench:
    """One turn that decodes, and cold sessions of one published history that wait for pages."""
    sizes = Sizes(
        num_pages=220,
        num_rows=num_waiting + 4,
        max_context_len=1000,
        chunk_tokens=64,
        max_running=num_waiting + 4,
        memory_check=MemoryCheck.WARN,
    )
    bench, history = Bench(sizes), tuple(number % 31 for number in range(400))
    bench.run(bench.submit_command(bench.open("first"), "publish", history, max_tokens=1))
    bench.run(CloseSession(session_id=SessionId("first")))
    bench.step(bench.submit_command(bench.open("runs"), "run", (30, *history[:200]), max_tokens=90))
    while not bench.tokens("run"):
        bench.settle()
    for number in range(num_waiting):
        name = bench.open(f"w{number}", tokens=history)
        tokens = (number, *history[:360])
        bench.step(bench.submit_command(name, f"t{number}", tokens, base_len=400))
    for _ in range(4):
        bench.settle()
    assert len(bench.engine.inspect().scheduler.waiting) == num_waiting
    return bench


def test_turns_that_wait_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_peeks = 0
    peek = SessionAwareCache.peek

    def counted(*arguments: Any) -> MatchResult:
        nonlocal num_peeks
        num_peeks += 1
        return peek(*arguments)

    bench = crowded(6)
    monkeypatch.setattr(SessionAwareCache, "peek", counted)
    for _ in range(10):
        bench.settle()
    assert num_peeks == 0
    other = bench.open("other", salt="b")
    bench.step(bench.submit_command(other, "elsewhere", (1, 2, 3), max_tokens=1, priority=99))
    for _ in range(8):
        bench.settle()
    assert bench.finished("elsewhere").num_outputs == 1
    assert num_peeks <= 2, "who comes himself was priced, nobody else again"


def test_a_step_costs_the_same_beside_many_that_wait() -> None:
    def cost(num_waiting: int) -> int:
        bench = crowded(num_waiting)
        step = bench.runner.execute()
        return count_calls(lambda: bench.engine.step(99.0, (), (step,)))

    assert cost(24) == cost(6)
