"""The memory checker in a running engine: what it finds, what that costs whom, who hears of it."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from cache.changes import Changes
from cache.checker import Violation
from cache.errors import AuditFailed
from cache.session_cache import SessionAwareCache
from cache.types import PoolName, SessionId, SlotState
from session_server.core.commands import ReportMemory
from session_server.core.events import EngineStats, MemoryReported, SessionCooled
from session_server.engine import guard
from session_server.engine.config import MemoryCheck, MemoryPolicy
from session_server.engine.memory import Damage, MemoryWatch
from session_server.engine_host.inline import InlineEngine
from session_server.engine_host.loop import EngineAssembly
from tests.engine.bench import POOL, Bench
from tests.engine_host.live_echo import LiveStage, assemble
from tests.engine_host.server_side import ServerSide
from tests.sim.hand_engine import Sizes

PROMPT = tuple(1 + i % 31 for i in range(20))


def tamper(cache: SessionAwareCache, session_id: SessionId) -> None:
    """Make a session's lease claim content that it has no pages for."""
    slot = cache.inspect().slots[session_id]
    assert slot.lease is not None
    slot.lease.computed_len = slot.lease.capacity_len + 1


def test_a_violation_costs_its_session_the_kv_and_nobody_else_anything() -> None:
    bench = Bench(Sizes(memory_check=MemoryCheck.WARN, chunk_tokens=8))
    sick, well = bench.open("sick"), bench.open("well")
    bench.step(bench.submit_command(sick, "a", PROMPT), bench.submit_command(well, "b", PROMPT[3:]))
    bench.settle()
    tamper(bench.cache, sick)
    bench.step(ReportMemory(request_id=1, full=True))
    assert bench.failed("a").code == "internal_inconsistency"
    assert SessionCooled(session_id=sick) in bench.events
    report = next(e for e in bench.events if isinstance(e, MemoryReported))
    assert report.checks.violations > 0
    assert any("sick" in text for text in report.checks.recent)
    bench.run()
    bench.expect("b", PROMPT[3:])
    bench.run(bench.submit_command(sick, "again", PROMPT))
    bench.expect("again", PROMPT)
    assert bench.cache.accounts()[POOL].quarantine > 0
    bench.close_all()


@pytest.mark.parametrize("memory_check", MemoryCheck)
def test_no_step_leaves_sessions_to_be_checked_later(memory_check: MemoryCheck) -> None:
    bench = Bench(Sizes(memory_check=memory_check))
    bench.run(bench.submit_command(bench.open("s"), "t", PROMPT))
    bench.close_all()
    assert not bench.engine.inspect().watch._touched


def test_a_violation_in_an_idle_session_is_found_in_a_moment_of_rest() -> None:
    bench = Bench(Sizes(memory_check=MemoryCheck.WARN))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT))
    assert bench.engine.is_audit_due
    tamper(bench.cache, session_id)
    bench.audit()
    assert not bench.engine.is_audit_due
    bench.step()
    assert bench.cache.slot(session_id).state is SlotState.COLD
    bench.run(bench.submit_command(session_id, "u", (3,), base_len=len(PROMPT) + 4))
    bench.expect("u", (*PROMPT, *bench.tokens("t"), 3))
    bench.close_all()


def test_a_recount_is_made_in_slices_with_turns_between_them() -> None:
    bench = Bench(Sizes(memory_check=MemoryCheck.WARN, num_pages=400, num_rows=60))
    for number in range(40):
        name = bench.open(f"s{number}")
        bench.run(bench.submit_command(name, f"t{number}", (number % 31, *PROMPT[number % 7 :])))
    num_slices = 0
    while not bench.engine.audit_slice():
        session_id, base_len = SessionId(f"s{num_slices}"), len(PROMPT) - num_slices % 7 + 1 + 4
        bench.run(bench.submit_command(session_id, f"u{num_slices}", (5, 6), base_len=base_len))
        assert bench.finished(f"u{num_slices}")
        num_slices += 1
    assert num_slices > 5
    assert bench.engine.is_audit_due, "what changed meanwhile is for the next one"
    bench.audit()
    assert not bench.engine.is_audit_due
    bench.run(ReportMemory(request_id=1))
    (report,) = [e for e in bench.events if isinstance(e, MemoryReported)]
    assert report.checks.levels["2"] == 2
    assert report.checks.violations == 0


def test_a_slice_that_disagrees_is_confirmed_before_anything_is_made_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(Sizes(memory_check=MemoryCheck.WARN))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT))
    monkeypatch.setattr(Changes, "record_session", lambda *_: None)
    monkeypatch.setattr("session_server.engine.memory.SLICE_UNITS", 1)
    assert not bench.engine.audit_slice()
    bench.run(bench.submit_command(session_id, "u", PROMPT, base_len=len(PROMPT) + 4))
    bench.audit()
    bench.run(ReportMemory(request_id=1))
    (report,) = [e for e in bench.events if isinstance(e, MemoryReported)]
    assert report.checks.violations == 0
    assert bench.cache.slot(session_id).state is SlotState.PARKED


@pytest.mark.parametrize(("most", "listed"), [(0, 0), (2, 2), (3, 3), (4, 3)])
def test_a_report_looks_at_no_more_sessions_than_it_lists(
    most: int, listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    opened = [bench.open(f"s{number}") for number in range(3)]
    seen: list[str] = []
    monkeypatch.setattr(guard, "session_pages", lambda slot: seen.append(slot.session_id))
    report = bench.engine._guard.report(ReportMemory(request_id=1, max_sessions=most), 0.0)
    assert (report.num_sessions, seen) == (3, [str(each) for each in opened[:listed]])


def test_what_a_probe_finds_in_the_tree_has_the_books_rebuilt_whoever_else_is_blamed() -> None:
    watch = MemoryWatch(
        Bench(Sizes()).cache, MemoryPolicy(MemoryCheck.WARN), stopwatch=time.perf_counter
    )
    blamed = Violation("a session's page is wrong", SessionId("s"))
    watch.note_content([blamed])
    assert watch.take_damage() == Damage((SessionId("s"),))
    for violations in ([blamed, Violation("a page is wrong")], [Violation("a page is wrong")]):
        watch.note_content(violations)
        watch.note_content([blamed])
        assert watch.take_damage() == Damage(
            (SessionId("s"),), has_unattributed=True, must_rebuild=True
        )
    assert watch.take_damage() == Damage()


def test_in_strict_mode_a_violation_raises_at_the_next_step() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT))
    tamper(bench.cache, session_id)
    with pytest.raises(AuditFailed):
        bench.step()


def test_a_turn_that_lost_its_room_to_quarantine_is_refused_and_does_not_hang() -> None:
    bench = Bench(Sizes(num_pages=12, memory_check=MemoryCheck.WARN))
    sick, well = bench.open("sick"), bench.open("well")
    bench.run(bench.submit_command(sick, "a", PROMPT))
    tamper(bench.cache, sick)
    bench.step(ReportMemory(request_id=1, full=True))
    bench.run(bench.submit_command(well, "b", PROMPT + PROMPT, max_tokens=4))
    assert bench.failed("b").code == "server_busy"
    bench.run(bench.submit_command(well, "c", PROMPT[:9], max_tokens=2))
    bench.expect("c", PROMPT[:9])
    bench.close_all()


def test_checks_are_counted_and_off_means_on_demand_only() -> None:
    counts = {}
    for mode in (MemoryCheck.OFF, MemoryCheck.WARN):
        bench = Bench(Sizes(memory_check=mode))
        session_id = bench.open("s")
        bench.run(bench.submit_command(session_id, "t", PROMPT))
        bench.run(ReportMemory(request_id=1, full=True))
        report = next(e for e in bench.events if isinstance(e, MemoryReported))
        counts[mode] = report.checks.runs
        assert report.checks.violations == 0
        assert report.pools[PoolName("full")].pages == bench.sizes.num_pages + 1
        assert [s.session_id for s in report.sessions] == ["s"]
        assert bench.engine.is_audit_due is False
    assert counts[MemoryCheck.OFF] == 1
    assert counts[MemoryCheck.WARN] > 3


def test_health_hears_at_once_what_an_idle_audit_found() -> None:
    assemblies: list[EngineAssembly] = []

    def build() -> EngineAssembly:
        stage = LiveStage(memory_check=MemoryCheck.WARN)
        assemblies.append(assemble(msgspec.msgpack.encode(stage)))
        return assemblies[0]

    async def scenario() -> None:
        server, client = ServerSide(), InlineEngine(build)
        await client.start(server.hear)
        await server.turn(client, "t", (1, 2, 3))
        tamper(assemblies[0].engine.inspect().cache, SessionId("s-t"))
        sample = await server.until(lambda e: isinstance(e, EngineStats) and e.check_violations > 0)
        assert isinstance(sample, EngineStats)
        assert SessionCooled(session_id=SessionId("s-t")) in server.events
        await client.stop()

    asyncio.run(scenario())
