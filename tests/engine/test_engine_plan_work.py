"""What a plan costs does not grow with the sessions that rest or the turns that wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from cache.types import SessionId, TurnId
from session_server.engine.plan import BlockReason, plan_step
from session_server.engine.settings import MemoryCheck
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
    """Counts the idle sessions that a plan asks."""

    asked: list[SessionId] = field(default_factory=list)

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
