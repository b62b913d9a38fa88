"""E: more than there is of anything, and what watches over the engine. In engine and sessions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache.types import SessionId, TurnId
from session_server.core.commands import OpenSession, ReportMemory, SubmitTurn
from session_server.core.errors import QuotaExceeded, ServerBusy, SessionNotFound
from session_server.core.events import FinishReason, MemoryReported, SessionRefused
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import SessionClosed, TurnDelta
from session_server.engine.config import MemoryCheck
from session_server.engine.engine import Engine
from session_server.protocol.frame_queue import MAX_OUTBOX_FRAMES
from session_server.protocol.session_protocol import CloseCode, SessionProtocol
from session_server.sessions.journal import Journal, JournalLimits
from session_server.sessions.quotas import QuotaLimits
from tests.engine.bench import POOL, Bench
from tests.mutants.guards import (
    ANSWERS_PILE_UP,
    CANCEL_WAITS_FOR_THE_DEVICE,
    NOTHING_EXPIRES,
    OWNERS_OPEN_WITHOUT_END,
    RECOMPUTES_HISTORY,
    SENDS_THE_WHOLE_HISTORY,
    SESSIONS_WITHOUT_END,
    TOKENS_WITHOUT_END,
    VIOLATION_KILLS_THE_SERVER,
)
from tests.mutants.in_sessions import JOURNAL_IS_UNBOUNDED
from tests.scenarios.lines import PROMPT, cancel, distinct
from tests.scenarios.registry import scenario
from tests.sessions.world import OWNER, World, completed, turn
from tests.sim.hand_engine import Sizes


@scenario("E1", JOURNAL_IS_UNBOUNDED)
def test_e1_a_session_that_nobody_reads_keeps_a_bounded_tail() -> None:
    journal = Journal(JournalLimits(max_bytes=10_000, max_entries=100, max_age_s=1e9))
    for index in range(5_000):
        journal.append(TurnDelta("t", "i", f"some text {index}", (1, 2, 3)))
        assert journal.num_bytes <= 10_000 + 1_000
        assert journal.last_seq - journal.first_seq < 100
    assert journal.last_seq == 5_000


@scenario("E1", ANSWERS_PILE_UP)
def test_e1_a_peer_that_asks_and_does_not_read_is_let_go() -> None:
    protocol = SessionProtocol(defaults=SamplingParams(), max_message_bytes=1 << 20)
    for _ in range(10 * MAX_OUTBOX_FRAMES):
        protocol.receive_frame('{"type":"ping","t":1}', now_s=0.0)
    assert protocol.close_code is CloseCode.OVERLOADED
    assert len(list(iter(protocol.take_frame, None))) <= MAX_OUTBOX_FRAMES


@scenario("E2", CANCEL_WAITS_FOR_THE_DEVICE)
def test_e2_nothing_of_a_cancelled_turn_is_launched_any_more() -> None:
    for num_in_flight in (1, 2):
        for num_steps in range(12):
            bench = Bench(Sizes(chunk_tokens=7, num_in_flight=num_in_flight))
            session_id = bench.open("s")
            bench.step(bench.submit_command(session_id, "t", PROMPT, max_tokens=200))
            for _ in range(num_steps):
                bench.settle()
            num_launched = len(bench.batches)
            bench.step(cancel("t", 0))
            assert bench.finished("t").reason is FinishReason.CANCELLED
            bench.run()
            assert len(bench.batches) == num_launched
            assert bench.engine.counters.overshoots <= num_in_flight
            bench.close_all()


@scenario("E3", TOKENS_WITHOUT_END)
def test_e3_however_many_tokens_are_asked_for_the_engine_is_asked_for_what_fits() -> None:
    with World(max_turn_len=64) as world:
        session = world.open()
        request = turn("1", (60,) * 20, max_tokens=1 << 20, min_tokens=1 << 20, ignore_eos=True)
        assert completed(world.run(session, request)).outcome.usage.output_tokens == 44
        (sent,) = [c for c in world.engine.seen if isinstance(c, SubmitTurn)]
        assert (sent.sampling.max_tokens, sent.sampling.min_tokens) == (44, 44)


@scenario("E4", OWNERS_OPEN_WITHOUT_END)
def test_e4_one_owner_cannot_open_more_than_its_share() -> None:
    with World(quotas=QuotaLimits(sessions=10, owner_sessions=3)) as world:
        for _ in range(3):
            world.open()
        for _ in range(2):
            with pytest.raises(QuotaExceeded):
                world.open()
        for _ in range(3):
            world.open(owner="b")
        assert world.manager.stats().sessions == 6


@scenario("E4", NOTHING_EXPIRES)
def test_e4_sessions_nobody_closes_are_closed_and_their_place_is_free() -> None:
    with World(quotas=QuotaLimits(sessions=4, owner_sessions=4)) as world:
        for index in range(4):
            completed(world.run(world.open(session_id=f"s{index}", ttl_s=60.0), turn("1")))
        journal = world.manager.journal(OWNER, "s0")
        with pytest.raises((QuotaExceeded, ServerBusy)):
            world.open()
        world.now_s += 61.0
        world.manager.tick()
        assert journal.read(journal.last_seq - 1)[0].entry == SessionClosed("expired")
        with pytest.raises(SessionNotFound):
            world.manager.get(OWNER, "s0")
        world.engine.run()
        assert not world.engine.slots
        world.open()


@scenario("E4", SESSIONS_WITHOUT_END)
def test_e4_the_engine_holds_as_many_sessions_as_it_was_told() -> None:
    bench = Bench()
    bench.hand.engine = Engine(bench.cache, replace(bench.hand.settings, max_sessions=3))
    for index in range(5):
        session_id = SessionId(f"s{index}")
        bench.step(OpenSession(session_id=session_id, tenant_salt="a"))
    refused = [(e.session_id, e.code) for e in bench.events if isinstance(e, SessionRefused)]
    assert refused == [("s3", "server_busy"), ("s4", "server_busy")]


@scenario("E5", RECOMPUTES_HISTORY)
def test_e5_the_fortieth_turn_computes_and_writes_what_the_fourth_did() -> None:
    bench = Bench(Sizes(num_pages=300, max_context_len=1024, chunk_tokens=64))
    session_id = bench.open("s")
    history: tuple[int, ...] = ()
    cost = []
    for index in range(40):
        num_batches = len(bench.batches)
        new = distinct(index, 8)
        bench.run(
            bench.submit_command(session_id, f"t{index}", new, base_len=len(history), max_tokens=8)
        )
        bench.expect(f"t{index}", history + new)
        history += new + tuple(bench.tokens(f"t{index}"))
        launches = bench.batches[num_batches:]
        num_positions = sum(row.num_tokens for batch in launches for row in batch.rows)
        num_pages = sum(len(w.pages) for batch in launches for w in batch.table_writes)
        cost.append((num_positions, num_pages, len(launches)))
    assert max(cost[1:]) == (16, 4, 8), cost
    assert cost[3] == cost[39]
    bench.close_all()


@scenario("E5", SENDS_THE_WHOLE_HISTORY)
def test_e5_the_fortieth_turn_tells_the_engine_as_much_as_the_fourth() -> None:
    with World() as world:
        session = world.open()
        for index in range(40):
            completed(world.run(session, turn(str(index), "Hello", max_tokens=4, ignore_eos=True)))
        sent = [len(c.tokens) for c in world.engine.seen if isinstance(c, SubmitTurn)]
        assert len(world.history(session)) > 400
        assert max(sent[20:]) <= max(sent[1:20]) < 20


@scenario("E8", VIOLATION_KILLS_THE_SERVER)
def test_e8_books_that_disagree_cost_one_session_its_kv_and_nobody_else_anything() -> None:
    bench = Bench(Sizes(memory_check=MemoryCheck.WARN, chunk_tokens=8))
    sick, well = bench.open("sick"), bench.open("well")
    bench.step(bench.submit_command(sick, "a", PROMPT), bench.submit_command(well, "b", PROMPT[3:]))
    bench.settle()
    slot = bench.cache.inspect().slots[sick]
    assert slot.lease is not None
    slot.lease.computed_len = slot.lease.capacity_len + 1
    bench.step(ReportMemory(request_id=1, full=True))
    assert bench.failed("a").code == "internal_inconsistency"
    report = next(e for e in bench.events if isinstance(e, MemoryReported))
    assert report.checks.violations > 0
    bench.run()
    bench.expect("b", PROMPT[3:])
    assert bench.turns[TurnId("b")].end is not None
    bench.run(bench.submit_command(sick, "again", PROMPT))
    bench.expect("again", PROMPT)
    assert bench.cache.accounts()[POOL].quarantine > 0
    bench.close_all()
