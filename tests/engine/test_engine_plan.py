"""The planner over frozen views: feasible plans, progress for everybody who fits alone."""

from __future__ import annotations

import doctest
from dataclasses import replace

from msgspec import structs

from cache.types import SessionId, TurnId
from session_server.engine import plan as plan_module
from session_server.engine.plan import plan_step
from session_server.engine.plan_admission import MAX_BYPASSES
from session_server.engine.scheduler_view import AdmissionQuote, BlockReason
from session_server.engine.shortage import PoolPages
from tests.engine import plan_views
from tests.engine.plan_views import (
    LIMITS,
    FakeIdle,
    FakeRunning,
    FakeView,
    FakeWaiting,
    in_line,
    running,
    waiting,
    work_of,
)


def test_the_worked_example_of_the_planner_is_right() -> None:
    names = {**vars(plan_views), "replace": replace}
    result = doctest.testmod(plan_module, extraglobs=names)
    assert (result.failed, result.attempted) == (0, 10)


def test_a_turn_that_lacks_one_position_gets_it_whatever_the_budget() -> None:
    streams = tuple(running(f"d{i}", 1, spare=1) for i in range(6))
    hog = running("hog", 1000, spare=1000)
    plan = plan_step(FakeView(running=(hog, *streams)), structs.replace(LIMITS, num_tokens=2))
    assert work_of(plan) == {"hog": 2} | {f"d{i}": 1 for i in range(6)}


def test_a_hog_shares_its_forward_with_those_who_come_after_it() -> None:
    view = FakeView(
        running=(running("hog", 1000, spare=1000),),
        waiting=(waiting("short", 5), waiting("long", 500, context=12)),
        headroom_pages=(50,),
    )
    plan = plan_step(view, LIMITS)
    assert work_of(plan) == {"hog": 6, "short": 5, "long": 5}
    assert plan.admit == ("short", "long")


def test_behind_a_turn_that_waits_for_pages_only_those_come_that_are_soon_done() -> None:
    line = (waiting("big", 40), waiting("long", 17), waiting("short", 3), waiting("late", 2))
    view = FakeView(
        running=(running("r", 1, spare=1),), waiting=line, headroom_pages=(2,), num_free_rows=9
    )
    plan = plan_step(view, LIMITS)
    assert plan.blocked == ("big", BlockReason.PAGES)
    assert (plan.admit, plan.num_bypasses) == (("short", "late"), 2)


def test_a_turn_that_waits_for_pages_is_passed_only_so_often() -> None:
    big = replace(waiting("big", 40), times_bypassed=MAX_BYPASSES - 1)
    view = FakeView(
        running=(running("r", 1, spare=1),),
        waiting=(big, waiting("one", 2), waiting("two", 2)),
        headroom_pages=(9,),
    )
    assert plan_step(view, LIMITS).admit == ("one",)
    tired = replace(big, times_bypassed=MAX_BYPASSES)
    assert plan_step(replace(view, waiting=(tired, *view.waiting[1:])), LIMITS).admit == ()


def test_nobody_passes_when_nothing_runs_that_could_give_pages() -> None:
    view = FakeView(waiting=(waiting("big", 40), waiting("small", 1)), headroom_pages=(9,))
    plan = plan_step(replace(view, is_in_flight=True), LIMITS)
    assert plan.admit == ()
    assert plan.blocked == ("big", BlockReason.PAGES)


def test_long_turns_leave_half_of_the_places_to_those_that_are_soon_done() -> None:
    hogs = tuple(running(f"hog{i}", 1000, spare=1000) for i in range(4))
    line = (waiting("fifth", 1000, context=9), waiting("short", 2), waiting("sixth", 1000))
    view = FakeView(running=hogs, waiting=line, headroom_pages=(99,), num_free_rows=9)
    plan = plan_step(view, LIMITS)
    assert plan.admit == ("short",)
    assert plan.blocked == ("fifth", BlockReason.TOKENS)
    assert sum(work_of(plan).values()) == LIMITS.num_tokens


def test_a_turn_behind_more_long_ones_than_a_forward_serves_is_seen() -> None:
    line = (*(waiting(f"hog{i}", 1000, context=9) for i in range(7)), waiting("short", 2))
    view = FakeView(waiting=line, headroom_pages=(999,), num_free_rows=9)
    assert plan_step(view, LIMITS).admit == ("hog0", "hog1", "hog2", "hog3", "short")


def test_admission_cools_the_least_recently_used_and_never_retracts() -> None:
    idle = (FakeIdle(SessionId("old"), (2,)), FakeIdle(SessionId("new"), (2,)))
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
    idle = (FakeIdle(turn.session_id, (3,)), FakeIdle(SessionId("other"), (3,)))
    plan = plan_step(FakeView(waiting=(turn,), idle_sessions=idle), LIMITS)
    assert plan.cool == ("other",)
    assert plan.admit == ("w",)


def test_the_session_of_an_admitted_turn_is_not_cooled_for_the_next_one() -> None:
    quote = AdmissionQuote(2, (1,), needs_row=False, own_pages=(3,))
    resident = FakeWaiting(TurnId("resident"), SessionId("own"), quote)
    own, other = FakeIdle(SessionId("own"), (3,)), FakeIdle(SessionId("other"), (3,))
    view = FakeView(
        waiting=(resident, waiting("w", 4)),
        idle_sessions=(own, other),
        headroom_pages=(9,),
        num_free_rows=0,
    )
    plan = plan_step(view, LIMITS)
    assert (plan.cool, plan.admit) == (("other",), ("resident", "w"))

    plan = plan_step(replace(view, idle_sessions=(own,)), LIMITS)
    assert (plan.cool, plan.admit) == ((), ("resident",))


def test_a_turn_that_needs_a_row_cools_an_idle_session_for_it() -> None:
    idle = (FakeIdle(SessionId("old"), (0,)),)
    view = FakeView(
        waiting=(waiting("w", 4),), idle_sessions=idle, headroom_pages=(9,), num_free_rows=0
    )
    plan = plan_step(view, LIMITS)
    assert (plan.cool, plan.admit) == (("old",), ("w",))


def test_cooling_comes_before_retracting_and_the_youngest_goes_first() -> None:
    view = FakeView(
        running=(running("a", 1), running("b", 1, spare=1, held=3), running("c", 1, held=3)),
        idle_sessions=(FakeIdle(SessionId("s"), (0,)),),
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
        idle_sessions=(FakeIdle(SessionId("s"), (1,)),),
    )
    plan = plan_step(view, structs.replace(LIMITS, num_tokens=64))
    assert (plan.cool, plan.retract) == ((), ())
    assert work_of(plan) == {"a": 1, "c": 1}


def test_what_was_taken_for_the_oldest_turn_goes_to_nobody_who_waits() -> None:
    """Cooling may free more than was counted; with a newcomer in between it would be too little."""
    view = FakeView(
        running=(running("old", 40, held=1),),
        waiting=(waiting("short", 4),),
        idle_sessions=(FakeIdle(SessionId("s"), (2,)), FakeIdle(SessionId("t"), (1,))),
    )
    plan = plan_step(view, structs.replace(LIMITS, num_tokens=64))
    assert (plan.cool, plan.admit, plan.work) == (("s", "t"), (), ())
    assert plan.blocked == ("short", BlockReason.SHORTAGE)


def test_two_long_prompts_do_not_evict_each_other_in_turns() -> None:
    first = running("first", 80, spare=0)
    view = FakeView(running=(first,), waiting=(waiting("second", 80),), headroom_pages=(30,))
    assert plan_step(view, LIMITS).blocked == ("second", BlockReason.PAGES)
    roomy = replace(view, headroom_pages=(40,))
    assert plan_step(roomy, LIMITS).admit == ("second",)


def test_a_short_turn_may_borrow_what_is_promised_to_a_long_one() -> None:
    view = FakeView(
        running=(running("hog", 80),), waiting=(waiting("short", 4),), headroom_pages=(20,)
    )
    assert plan_step(view, LIMITS).admit == ("short",)


def test_a_turn_that_cannot_ever_proceed_is_named_and_not_left_hanging() -> None:
    view = FakeView(waiting=(waiting("w", 40),), headroom_pages=(3,))
    assert plan_step(view, LIMITS).refuse == "w"
    assert plan_step(replace(view, is_in_flight=True), LIMITS).refuse is None


def test_the_first_turn_behind_a_full_forward_waits_for_tokens() -> None:
    line = tuple(waiting(f"w{i}", 1) for i in range(5))
    view = FakeView(waiting=line, headroom_pages=(99,))
    plan = plan_step(view, structs.replace(LIMITS, num_tokens=4))
    assert plan.admit == ("w0", "w1", "w2", "w3")
    assert plan.blocked == ("w4", BlockReason.TOKENS)


def test_at_most_the_limit_of_turns_runs() -> None:
    view = FakeView(
        running=tuple(running(f"r{i}", 1, spare=1) for i in range(7)),
        waiting=(waiting("w1", 1), waiting("w2", 1)),
        headroom_pages=(9,),
    )
    plan = plan_step(view, LIMITS)
    assert plan.admit == ("w1",)
    assert plan.blocked == ("w2", BlockReason.TURNS)


def test_drafts_get_what_is_left_and_never_take_a_page() -> None:
    drafting = replace(running("g", 1, spare=2), num_drafts=6)
    first = replace(running("f", 1, spare=8), num_drafts=4)
    hog = running("hog", 30, spare=30)

    def drafts_of(view: FakeView, num_tokens: int = 64) -> dict[str, int]:
        plan = plan_step(view, structs.replace(LIMITS, num_tokens=num_tokens))
        assert (plan.cool, plan.retract) == ((), ())
        return {work.turn_id: work.num_drafts for work in plan.work if work.num_drafts}

    idle = (FakeIdle(SessionId("s"), (9,)),)
    short = FakeView(running=(first, drafting, hog), idle_sessions=idle)
    assert drafts_of(short) == {"f": 4, "g": 1}, "only into pages it has"
    assert drafts_of(replace(short, headroom_pages=(2,))) == {"f": 4, "g": 6}
    assert drafts_of(replace(short, headroom_pages=(2,)), 37) == {"f": 4, "g": 3}
    assert drafts_of(replace(short, headroom_pages=(2,)), 30) == {}, "prompts come first"


# Several pools: full attention and, second, a window


def two_pools(name: str, freed: PoolPages) -> FakeIdle:
    return FakeIdle(SessionId(name), freed)


def test_who_has_nothing_of_what_is_short_is_left_in_peace() -> None:
    turn = FakeRunning(TurnId("r"), 9, held_pages=(0, 0), promised_pages=(3, 3))
    view = FakeView(
        running=(turn,),
        idle_sessions=(two_pools("long", (9, 0)), two_pools("new", (0, 1)), two_pools("w", (1, 2))),
        headroom_pages=(5, 0),
    )
    plan = plan_step(view, LIMITS)
    assert (plan.cool, work_of(plan)) == (("new", "w"), {"r": 9})
    other_way = replace(view, headroom_pages=(0, 5))
    assert plan_step(other_way, LIMITS).cool == ("long",)


def test_a_session_that_was_passed_over_gives_to_the_next_who_needs_what_it_has() -> None:
    first = FakeRunning(TurnId("first"), 4, held_pages=(0, 0), promised_pages=(1, 1))
    line = (in_line("second", 4, (6, 1)),)
    idle = (two_pools("long", (9, 0)), two_pools("window", (0, 4)))
    view = FakeView(running=(first,), waiting=line, idle_sessions=idle, headroom_pages=(1, 0))
    plan = plan_step(view, LIMITS)
    assert plan.cool == ("window", "long")
    assert (plan.admit, plan.blocked) == (("second",), None)


def test_a_younger_turn_without_a_page_of_the_short_pool_goes_on() -> None:
    young = [
        FakeRunning(TurnId("b"), 1, 1, held_pages=(1, 3), promised_pages=(0, 0)),
        FakeRunning(TurnId("c"), 1, 1, held_pages=(9, 0), promised_pages=(0, 0)),
    ]
    old = FakeRunning(TurnId("a"), 9, held_pages=(0, 0), promised_pages=(3, 3))
    plan = plan_step(FakeView(running=(old, *young), headroom_pages=(3, 0)), LIMITS)
    assert plan.retract == ("b",)
    assert work_of(plan) == {"a": 9, "c": 1}


def test_the_oldest_turn_is_given_everything_before_it_is_given_up() -> None:
    """Pages that sessions share are reported by none of them, whatever else they report."""
    old = FakeRunning(TurnId("a"), 9, held_pages=(0, 0), promised_pages=(3, 3))
    young = FakeRunning(TurnId("b"), 1, 1, held_pages=(9, 0), promised_pages=(0, 0))
    idle = (two_pools("x", (2, 0)), two_pools("y", (2, 0)))
    view = FakeView(running=(old, young), idle_sessions=idle, headroom_pages=(9, 0))
    plan = plan_step(view, LIMITS)
    assert (plan.cool, plan.retract, plan.refuse) == (("x", "y"), ("b",), None)


def test_what_running_turns_still_take_is_counted_in_each_pool() -> None:
    """A window takes a few pages of a long prompt, and leaves the others to the next."""
    first = FakeRunning(TurnId("first"), 80, held_pages=(0, 0), promised_pages=(20, 5))
    line = (in_line("second", 80, (20, 5)),)
    view = FakeView(running=(first,), waiting=line, headroom_pages=(40, 10))
    assert plan_step(view, LIMITS).admit == ("second",)
    for short in ((39, 10), (40, 9)):
        blocked = plan_step(replace(view, headroom_pages=short), LIMITS).blocked
        assert blocked == ("second", BlockReason.PAGES)
