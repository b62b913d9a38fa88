"""Level 3 in a running engine: when pages are verified, what is found, and who is named."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from cache.checker import find_violations
from cache.errors import AuditFailed
from cache.types import SessionId, SlotState
from session_server.core.batch import Batch
from session_server.core.commands import CancelTurn, CloseSession, ReportMemory
from session_server.core.events import CheckerReport, MemoryReported
from session_server.core.ids import TurnId
from session_server.engine.config import MemoryCheck
from tests.engine.bench import POOL, Bench
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers, Mixture

PAGE_SIZE = 4
PROMPT = tuple(1 + i % 31 for i in range(10))
ALWAYS_S = 0.01
"""A probe is due after every step of work."""


def bench_of(*, interval_s: float = ALWAYS_S, mode: MemoryCheck = MemoryCheck.WARN) -> Bench:
    return Bench(
        Sizes(num_pages=200, memory_check=mode, chunk_tokens=8), probe_interval_s=interval_s
    )


def park(bench: Bench, name: str, prompt: tuple[int, ...], *, salt: str | None = None) -> SessionId:
    """A session that holds the KV of a prompt and three outputs."""
    session_id = bench.open(name, salt=salt or name)
    bench.run(bench.submit_command(session_id, name, prompt, max_tokens=4))
    return session_id


def work(bench: Bench, num_steps: int) -> list[Batch]:
    """So many steps of a turn that goes on and on; gives the forwards."""
    if TurnId("work") not in bench.turns:
        session_id = bench.open("worker", salt="worker")
        bench.step(bench.submit_command(session_id, "work", (7, 8, 9), max_tokens=200))
    before = len(bench.batches)
    for _ in range(num_steps):
        bench.settle()
    return bench.batches[before:]


def rest(bench: Bench) -> None:
    """Let the worker go, and everything come to rest."""
    bench.run(CancelTurn(turn_id=TurnId("work"), num_outputs=0))


def checks(bench: Bench) -> CheckerReport:
    bench.step(ReportMemory(request_id=9))
    return [e for e in bench.events if isinstance(e, MemoryReported)][-1].checks


def page_of(bench: Bench, session_id: SessionId, index: int) -> int:
    slot = bench.cache.inspect().slots[session_id]
    assert slot.lease is not None
    return int(bench.cache.inspect().stores.rows.entries(POOL, slot.lease.row)[index])


def places(bench: Bench) -> set[tuple[int, int, int]]:
    """(row, start, length) of every page of every parked session."""

    def all_places() -> Iterator[tuple[int, int, int]]:
        for slot in bench.cache.inspect().slots.values():
            if slot.state is SlotState.PARKED:
                assert slot.lease is not None
                for start in range(0, slot.kv_committed_len, PAGE_SIZE):
                    length = min(PAGE_SIZE, slot.kv_committed_len - start)
                    yield slot.lease.row, start, length

    return set(all_places())


# When


def test_a_probe_follows_every_interval_of_work() -> None:
    bench = bench_of(interval_s=0.3)
    park(bench, "a", PROMPT)
    batches = work(bench, 150)
    probes = [i for i, batch in enumerate(batches) if batch.probe is not None]
    gaps = {later - earlier for earlier, later in itertools.pairwise(probes)}
    assert len(probes) >= 4
    assert min(gaps) >= 30
    assert max(gaps) <= 33
    assert all(batch.rows == () for batch in batches if batch.probe is not None)


def test_no_turn_waits_for_more_than_one_probe_at_a_time() -> None:
    bench = bench_of()
    park(bench, "a", PROMPT)
    batches = work(bench, 120)
    kinds = ["probe" if batch.probe else "turn" for batch in batches]
    assert kinds.count("probe") > 40
    assert ("probe", "probe") not in set(itertools.pairwise(kinds))
    assert len(bench.tokens("work")) > 40
    bench.expect("work", (7, 8, 9))


def test_an_engine_at_rest_looks_once_per_audit_and_then_sleeps() -> None:
    bench = bench_of()
    park(bench, "a", PROMPT)
    bench.now_s += 1000.0
    assert bench.step().batch is None, "no work, no probe"
    bench.audit()
    batch = bench.step().batch
    assert batch is not None
    assert batch.probe is not None
    assert bench.settle().is_blocked
    bench.now_s += 1000.0
    assert bench.step().batch is None
    assert checks(bench).probes == 1


@pytest.mark.parametrize("mode", [MemoryCheck.OFF, MemoryCheck.WARN])
def test_off_means_that_nobody_looks(mode: MemoryCheck) -> None:
    bench = bench_of(mode=mode)
    park(bench, "a", PROMPT)
    work(bench, 60)
    bench.audit()
    rest(bench)
    assert (checks(bench).probes > 0) is (mode is MemoryCheck.WARN)


def test_nobody_is_looked_at_where_nobody_is_parked() -> None:
    bench = bench_of()
    assert not [batch for batch in work(bench, 60) if batch.probe]


def test_no_probe_comes_between_a_failed_forward_and_its_retry() -> None:
    bench = bench_of()
    park(bench, "a", PROMPT)
    work(bench, 20)
    failed: list[int] = []
    for _ in range(12):
        ahead = bench.engine.inspect().in_flight.num_forwards + 1
        bench.runner.faults.fail_steps.add(ahead)
        work(bench, 1)
        while (oldest := bench.runner.next_batch()) is not None and oldest.step < ahead:
            work(bench, 1)
        if oldest is not None and oldest.rows:
            failed.append(ahead)
            follower = work(bench, 3)[0]
            assert follower.rows, "the turn that is retried alone goes first"
            assert follower.rows[0].attempt > oldest.rows[0].attempt
        work(bench, 6)
    assert len(failed) >= 3
    bench.expect("work", (7, 8, 9))


# What


def test_one_rotation_looks_at_every_page_of_every_parked_session() -> None:
    bench = bench_of()
    for number, length in enumerate((3, 8, 30, 13)):
        park(bench, f"s{number}", (number + 1,) * length)
    expected = places(bench)
    longest = max(start // PAGE_SIZE + 1 for _, start, _ in expected)
    num_probes = 4 * longest
    batches = work(bench, 3 * num_probes)
    probes = [batch.probe for batch in batches if batch.probe is not None][:num_probes]
    assert len(probes) == num_probes
    assert {(p.row, p.start, len(p.tokens)) for p in probes} == expected
    assert checks(bench).violations == 0


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_damaged_page_is_found_within_one_rotation_and_only_its_session_pays(index: int) -> None:
    bench = bench_of()
    sick, well = park(bench, "sick", PROMPT), park(bench, "well", PROMPT)
    tokens = (*PROMPT, *bench.tokens("sick"))
    assert bench.cache.slot(sick).committed_len == 13, "three published pages and a tail"
    bench.runner.memory.damage(page_of(bench, sick, index))
    work(bench, 3 * 2 * 4)
    report = checks(bench)
    assert report.quarantined_sessions == (sick,)
    assert report.rebuilds == 0
    assert "other KV than their tokens" in report.recent[0]
    assert bench.cache.slot(sick).state is SlotState.COLD
    assert bench.cache.slot(well).state is SlotState.PARKED
    rest(bench)
    bench.expect("work", (7, 8, 9))
    for session_id in (sick, well):
        base_len = len(tokens)
        bench.run(bench.submit_command(session_id, f"{session_id}2", (5, 6), base_len=base_len))
        bench.expect(f"{session_id}2", (*tokens, 5, 6)) if session_id == sick else None
        assert bench.finished(f"{session_id}2").cached_tokens == (0 if session_id == sick else 13)
    bench.close_all()


@pytest.mark.parametrize("length", [4, 13])
def test_a_damaged_state_is_found_and_only_its_session_pays(length: int) -> None:
    """One that was published with its page, and one that is a session's own."""
    bench = Bench(
        Sizes(
            num_pages=200,
            memory_check=MemoryCheck.WARN,
            chunk_tokens=8,
            layers=Layers(Mixture.FULL_AND_RECURRENT),
        ),
        probe_interval_s=ALWAYS_S,
    )
    prompt = PROMPT[: length - 3]
    sick, well = park(bench, "sick", prompt), park(bench, "well", prompt)
    slot = bench.cache.inspect().slots[sick]
    assert slot.lease is not None
    assert slot.lease.states.lengths == ([] if length % PAGE_SIZE == 0 else [length])
    assert bench.runner.states is not None
    bench.runner.states.damage(slot.lease.state_at(length))
    work(bench, 3 * 2 * 4)
    assert checks(bench).quarantined_sessions == (sick,)
    assert bench.cache.slot(sick).state is SlotState.COLD
    assert bench.cache.slot(well).state is SlotState.PARKED
    rest(bench)
    tokens = (*prompt, *bench.tokens("sick"))
    bench.run(bench.submit_command(sick, "sick2", (5, 6), base_len=len(tokens)))
    bench.expect("sick2", (*tokens, 5, 6))
    bench.close_all()


def test_everybody_who_shares_a_damaged_page_is_blamed() -> None:
    bench = bench_of()
    names = ("a", "b", "c")
    shared = tuple(range(1, 9))
    sharing = [park(bench, name, (*shared, 20 + i), salt="t") for i, name in enumerate(names)]
    alone = park(bench, "alone", shared, salt="other")
    assert len({page_of(bench, session_id, 1) for session_id in sharing}) == 1
    bench.runner.memory.damage(page_of(bench, sharing[0], 1))
    work(bench, 40)
    assert set(checks(bench).quarantined_sessions) == set(sharing)
    assert bench.cache.slot(alone).state is SlotState.PARKED
    rest(bench)
    for i, session_id in enumerate(sharing):
        bench.run(bench.submit_command(session_id, f"{session_id}2", (*shared, 20 + i)))
        bench.expect(f"{session_id}2", (*shared, 20 + i))
    bench.close_all()


def test_a_fault_behind_a_shared_beginning_has_that_looked_at_next() -> None:
    bench = bench_of(interval_s=0.2)
    shared = tuple(range(1, 13))
    a, b = (park(bench, name, (*shared, 20 + i), salt="t") for i, name in enumerate("ab"))
    bench.runner.memory.damage(page_of(bench, a, 3))
    while not checks(bench).violations:
        work(bench, 1)
    found = len(bench.batches)
    rest(bench)
    probes = [batch.probe for batch in bench.batches[found:] if batch.probe]
    # The first of the three may have been launched by the step that took in the verdict.
    assert [probe.start for probe in probes][-2:] == [4, 8]
    assert len(bench.batches) - found < 8, "a probe that waits its time comes after 20 forwards"
    assert checks(bench).quarantined_sessions == (a,)
    assert bench.cache.slot(b).state is SlotState.PARKED


# Races of the verdict


def probe_in_flight(bench: Bench) -> SessionId:
    """One parked session, its only page damaged, and a probe of it launched but not executed."""
    session_id = park(bench, "s", (5, 6, 7), salt="t")
    bench.audit()
    batch = bench.step().batch
    assert batch is not None
    assert batch.probe is not None
    bench.runner.memory.damage(page_of(bench, session_id, batch.probe.start // PAGE_SIZE))
    return session_id


def test_a_turn_that_began_on_the_page_meanwhile_fails_and_can_be_sent_again() -> None:
    bench = bench_of()
    session_id = probe_in_flight(bench)
    history = (5, 6, 7, *bench.tokens("s"))
    bench.step(bench.submit_command(session_id, "t", (9,), base_len=len(history)))
    bench.run()
    assert bench.failed("t").code == "internal_inconsistency"
    assert bench.failed("t").history_len == len(history)
    bench.run(bench.submit_command(session_id, "t2", (9,), base_len=len(history)))
    bench.expect("t2", (*history, 9))
    bench.close_all()


def test_a_page_that_a_rewind_has_given_up_meanwhile_is_nobodys_but_may_be_published() -> None:
    bench = bench_of()
    session_id = probe_in_flight(bench)
    bench.run(bench.submit_command(session_id, "t", (9,), base_len=3))
    assert checks(bench).rebuilds == 1
    assert bench.finished("t").num_retractions == 1
    bench.expect("t", (5, 6, 7, 9))
    bench.close_all()


def test_a_page_whose_session_is_gone_may_still_be_published_so_all_is_begun_again() -> None:
    bench = bench_of()
    session_id = probe_in_flight(bench)
    other = park_while_probing(bench)
    bench.step(CloseSession(session_id=session_id))
    bench.run()
    report = checks(bench)
    assert (report.rebuilds, report.quarantined_sessions) == (1, ())
    assert "gone meanwhile" in report.recent[0]
    assert find_violations(bench.cache, 2) == []
    bench.run(bench.submit_command(other, "again", (5, 6, 7)))
    bench.expect("again", (5, 6, 7))
    bench.close_all()


def park_while_probing(bench: Bench) -> SessionId:
    return bench.open("other", salt="t")


def test_a_device_that_refuses_a_probe_has_found_nothing() -> None:
    bench = bench_of()
    session_id = park(bench, "s", PROMPT)
    bench.audit()
    bench.runner.faults.fail_steps.add(bench.engine.inspect().in_flight.num_forwards + 1)
    bench.step()
    bench.settle()
    report = checks(bench)
    assert (report.probes, report.violations) == (0, 0)
    assert bench.cache.slot(session_id).state is SlotState.PARKED


def test_in_strict_mode_a_damaged_page_raises() -> None:
    bench = bench_of(mode=MemoryCheck.STRICT)
    probe_in_flight(bench)
    with pytest.raises(AuditFailed, match="other KV"):
        bench.run()
