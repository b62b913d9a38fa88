"""Books that were broken on purpose are made right again: who pays for it, and who notices."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable

import pytest

from cache.checker import find_violations
from cache.errors import AuditFailed
from cache.session_cache import SessionAwareCache
from cache.types import SlotState
from cache.views import SlotView
from session_server.core.commands import CloseSession, ReportMemory
from session_server.core.events import (
    EngineStats,
    MemoryReported,
    SessionCooled,
    SessionGone,
    TurnFailed,
    TurnFinished,
)
from session_server.engine import trace
from session_server.engine.config import MemoryCheck
from session_server.engine.guard import MAX_REBUILDS
from session_server.engine.trace import NUM_STEPS
from tests.cache import damage
from tests.cache.damage import LENT, PARKED
from tests.cache.free_lists import free_pages
from tests.engine.bench import POOL, Bench
from tests.sim.hand_engine import Sizes

PROMPT = tuple(1 + i % 31 for i in range(10))
Damage = Callable[[SessionAwareCache], None]


class Repair:
    """A parked session, a lent one and a well one, with damage done to the books under them."""

    def __init__(self, mode: MemoryCheck = MemoryCheck.WARN, num_in_flight: int = 2) -> None:
        stage = Sizes(memory_check=mode, num_in_flight=num_in_flight, chunk_tokens=8)
        self.bench = bench = Bench(stage)
        for name in (PARKED, LENT, "well", "newcomer"):
            bench.open(name, salt=name)
        bench.run(bench.submit_command(PARKED, "first", PROMPT, max_tokens=4))
        bench.step(bench.submit_command(LENT, "lent", PROMPT[1:], max_tokens=40))
        bench.step(
            bench.submit_command(damage.SessionId("well"), "well", PROMPT[2:], max_tokens=40)
        )
        for _ in range(12):
            bench.settle()
        assert bench.cache.slot(LENT).state is SlotState.LENT
        assert bench.cache.slot(LENT).private_pages[POOL] > 0
        assert bench.cache.slot(PARKED).private_pages[POOL] > 0

    def go_on(self) -> None:
        """Work that takes and gives pages, then a moment of rest."""
        bench = self.bench
        newcomer = damage.SessionId("newcomer")
        bench.run(bench.submit_command(newcomer, "new", PROMPT * 5, max_tokens=3))
        if bench.engine.is_audit_due:
            bench.audit()
        bench.run()

    def report(self) -> MemoryReported:
        """What the engine says of its memory."""
        self.bench.run(ReportMemory(request_id=5, trace=True))
        return [e for e in self.bench.events if isinstance(e, MemoryReported)][-1]


BLAMED: list[Damage] = [
    damage.publish_other_tokens,
    damage.point_a_row_elsewhere,
    damage.run_ahead_of_the_history,
    damage.fall_behind_the_lock,
]
"""The session is known; the books are right once its pages are in quarantine."""

NOBODYS_FAULT: list[Damage] = [
    damage.share_a_page,
    damage.free_a_held_page,
    damage.misbook_a_page,
    damage.lose_a_lock,
    damage.lock_once_too_often,
    damage.detach_a_locked_node,
    damage.hang_a_node_under_another_key,
    damage.write_the_padding_row,
    damage.leak_a_row,
    damage.lose_a_free_page,
    damage.invent_a_free_page,
    damage.forget_active_pages,
]
"""The books have to be begun again."""


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("break_books", BLAMED + NOBODYS_FAULT, ids=lambda f: f.__name__)
def test_whatever_breaks_is_repaired_and_every_answer_is_right_or_refused(
    break_books: Damage, num_in_flight: int
) -> None:
    stage = Repair(num_in_flight=num_in_flight)
    bench = stage.bench
    break_books(bench.cache)
    stage.go_on()
    report = stage.report()
    assert report.checks.violations > 0
    assert report.checks.rebuilds == (break_books in NOBODYS_FAULT)
    assert find_violations(bench.cache, 2) == []
    prompts = {"lent": PROMPT[1:], "well": PROMPT[2:], "new": PROMPT * 5}
    for name, prompt in prompts.items():
        end = bench.turns[damage.SessionId(name)].end  # type: ignore[index]
        assert end is not None, f"{name} hangs"
        if isinstance(end, TurnFailed):
            assert end.code == "internal_inconsistency"
            assert (end.session_id == LENT) or report.checks.rebuilds, "it was nobody else's fault"
        else:
            bench.expect(name, prompt)
    for name in (PARKED, LENT, damage.SessionId("well")):
        bench.run(bench.submit_command(name, f"again {name}", PROMPT, max_tokens=5))
        bench.expect(f"again {name}", PROMPT)
    bench.close_all()


def test_both_ways_of_repair_and_of_ending_are_met() -> None:
    """What the parametrised test above would pass without."""
    ends: dict[str, set[str]] = {}
    for break_books in (
        damage.point_a_row_elsewhere,
        damage.lose_a_free_page,
        damage.forget_active_pages,
    ):
        stage = Repair()
        break_books(stage.bench.cache)
        stage.go_on()
        ends[break_books.__name__] = {
            f"{turn_id} {type(seen.end).__name__}" for turn_id, seen in stage.bench.turns.items()
        }
    assert "lent TurnFinished" in ends["point_a_row_elsewhere"]
    assert "lent TurnFinished" in ends["lose_a_free_page"], "found between steps: retracted"
    in_a_verb = ends["forget_active_pages"]
    assert {"lent TurnFailed", "well TurnFailed"} & in_a_verb, "nobody knows which was half changed"


def test_a_failed_assertion_ends_the_engine_as_ever() -> None:
    stage = Repair(num_in_flight=1)
    damage.lose_a_private_page(stage.bench.cache)
    with pytest.raises(AssertionError, match="KV grows within its pages"):
        stage.go_on()


def test_a_page_that_is_listed_free_twice_goes_to_one_holder_or_to_nobody() -> None:
    outcomes: Counter[str] = Counter()
    num_free = len(free_pages(Repair().bench.cache.inspect().stores.allocators[POOL]))
    for index in range(num_free):
        stage = Repair()
        bench = stage.bench
        damage.list_a_free_page_twice(bench.cache, index)
        stage.go_on()
        assert find_violations(bench.cache, 2) == []
        for name, prompt in (("lent", PROMPT[1:]), ("well", PROMPT[2:]), ("new", PROMPT * 5)):
            seen = bench.turns[damage.SessionId(name)]  # type: ignore[index]
            outcomes[type(seen.end).__name__] += 1
            if isinstance(seen.end, TurnFinished):
                bench.expect(name, prompt)
        outcomes["rebuild"] += stage.report().checks.rebuilds
        bench.close_all()
    assert outcomes["rebuild"] > num_free / 2, outcomes
    assert outcomes["TurnFinished"] > outcomes["TurnFailed"] > 0, outcomes


@pytest.mark.parametrize("mode", [MemoryCheck.STRICT, MemoryCheck.OFF])
def test_where_nothing_is_repaired_broken_books_raise(mode: MemoryCheck) -> None:
    stage = Repair(mode)
    damage.forget_active_pages(stage.bench.cache)
    with pytest.raises(AuditFailed):
        stage.go_on()


def test_a_rebuild_between_steps_retracts_and_nobody_hears_of_it() -> None:
    stage = Repair()
    bench = stage.bench
    damage.lose_a_free_page(bench.cache)
    num_events = len(bench.events)
    bench.step()
    cooled = [e for e in bench.events[num_events:] if isinstance(e, SessionCooled)]
    assert cooled == [SessionCooled(session_id=PARKED)]
    assert [turn.turn_id for turn in bench.engine.inspect().scheduler.waiting] == ["lent", "well"]
    stage.go_on()
    for name, prompt in (("lent", PROMPT[1:]), ("well", PROMPT[2:])):
        assert bench.finished(name).num_retractions == 1
        bench.expect(name, prompt)
    report = stage.report()
    assert report.checks.rebuilds == 1
    assert report.checks.reprefill_tokens > 3 * len(PROMPT)
    bench.close_all()


def test_a_close_that_stumbles_over_wrong_books_is_carried_out_all_the_same() -> None:
    stage = Repair()
    bench = stage.bench
    damage.forget_active_pages(bench.cache)
    bench.run(CloseSession(session_id=LENT))
    assert SessionGone(session_id=LENT) in bench.events
    assert LENT not in bench.cache
    assert bench.failed("lent").code == "internal_inconsistency"
    assert bench.failed("well").code == "internal_inconsistency"
    bench.close_all()


def test_pages_stay_in_quarantine_when_the_books_are_begun_again() -> None:
    stage = Repair()
    bench = stage.bench
    damage.point_a_row_elsewhere(bench.cache)
    bench.step(ReportMemory(request_id=1, full=True))
    condemned = set(bench.cache.inspect().stores.quarantined[POOL])
    assert len(condemned) == 4
    damage.lose_a_free_page(bench.cache)
    stage.go_on()
    assert stage.report().checks.rebuilds == 1
    assert set(bench.cache.inspect().stores.quarantined[POOL]) == condemned
    assert stage.report().checks.quarantined_sessions == (PARKED,)
    bench.close_all()
    assert bench.cache.accounts()[POOL].quarantine == len(condemned)


def test_books_that_go_wrong_again_and_again_end_the_engine() -> None:
    stage = Repair()
    for _ in range(MAX_REBUILDS):
        damage.lose_a_free_page(stage.bench.cache)
        stage.bench.step()
    damage.lose_a_free_page(stage.bench.cache)
    with pytest.raises(AuditFailed, match="times"):
        stage.bench.step()


def test_books_that_beginning_them_again_does_not_mend_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Repair().bench
    rebuild = bench.cache.rebuild

    def rebuild_and_damage() -> list[SlotView]:
        resident = rebuild()
        damage.lose_a_free_page(bench.cache)
        return resident

    monkeypatch.setattr(bench.cache, "rebuild", rebuild_and_damage)
    damage.lose_a_free_page(bench.cache)
    with pytest.raises(AuditFailed, match="right after a rebuild"):
        bench.step()


# What is told


def test_the_steps_before_the_first_violation_are_kept_and_hold_no_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Repair()
    bench = stage.bench
    assert stage.report().trace == ()
    damage.lose_a_free_page(bench.cache)
    with caplog.at_level(logging.ERROR):
        bench.step()
    num_steps = bench.engine.inspect().watch.trace.num_steps
    stage.go_on()
    trace = stage.report().trace
    assert [step.step for step in trace] == list(range(1, num_steps + 1))
    assert trace[-1].now_s < bench.now_s
    rows = [row for step in trace for row in step.rows]
    assert {row.turn_id for row in rows} == {"first", "lent", "well"}
    assert sum(row.num_tokens for row in rows if row.turn_id == "first") == len(PROMPT) + 3
    assert {turn for step in trace for turn in step.admitted} == {"first", "lent", "well"}
    assert {kind for step in trace for kind in step.commands} >= {"OpenSession", "SubmitTurn"}
    launched = [step.launched for step in trace if step.launched is not None]
    settled = [number for step in trace for number in step.settled]
    assert launched == [batch.step for batch in bench.batches[: len(launched)]]
    assert settled == launched[: len(settled)]
    logged = [r.getMessage() for r in caplog.records if "before it" in r.getMessage()]
    assert json.loads(logged[-1].partition("before it ")[2])["step"] == num_steps
    assert all(len(line) < 4096 for line in logged)


def test_a_trace_is_bounded() -> None:
    bench = Bench(Sizes(memory_check=MemoryCheck.WARN))
    for _ in range(NUM_STEPS + 7):
        bench.step()
    damage.lose_a_free_page(bench.cache)
    bench.step(ReportMemory(request_id=1))
    bench.step(ReportMemory(request_id=2, trace=True))
    report = [e for e in bench.events if isinstance(e, MemoryReported)][-1]
    assert len(report.trace) == NUM_STEPS


@pytest.mark.parametrize(("spare", "num_dropped"), [(1, 0), (0, 0), (-1, 1)])
def test_a_trace_is_bounded_over_the_rows_of_all_its_steps(
    monkeypatch: pytest.MonkeyPatch, spare: int, num_dropped: int
) -> None:
    bench = Bench(Sizes(memory_check=MemoryCheck.WARN))
    kept = bench.engine.inspect().watch.trace
    steps = kept._ring
    bench.run(bench.submit_command(bench.open("s"), "t", PROMPT))
    num_entries = sum(
        len(kept._with_rows(step).rows)
        + len(step.commands)
        + len(step.settled)
        + len(step.admitted)
        for step in steps
    )
    first = steps[0].step
    monkeypatch.setattr(trace, "MAX_TRACED", num_entries + spare)
    bench.step()  # a step of nothing
    assert steps[0].step == first + num_dropped


def test_a_violation_is_in_the_figures_of_its_own_step() -> None:
    stage = Repair()
    damage.lose_a_free_page(stage.bench.cache)
    num_events = len(stage.bench.events)
    stage.bench.step()
    samples = [e for e in stage.bench.events[num_events:] if isinstance(e, EngineStats)]
    assert [sample.check_violations for sample in samples] == [1]
