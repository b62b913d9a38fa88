"""L: what is taken and never given back."""

from __future__ import annotations

from cache.types import TurnId
from session_server.core.events import FinishReason, SessionGone, TurnFinished
from session_server.engine.config import Drafter
from session_server.sessions.journal import JournalLimits
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from tests.engine.bench import POOL, Bench
from tests.mutants.in_leases import OVERSHOOT_STAYS, RELEASE_DROPS_TAIL, RELEASE_KEEPS_ROW
from tests.mutants.in_radix import LOCK_COVERS_WHOLE_EDGE, UNLOCK_FREES_THE_LAST_NODE
from tests.mutants.in_scheduling import QUOTE_TAKES_A_LOCK, SECOND_TURN_IS_ADMITTED
from tests.mutants.in_sessions import (
    CLOSED_SESSION_HOLDS_QUOTA,
    CLOSED_SESSION_STAYS_IN_ENGINE,
    ENDED_TURN_HOLDS_QUOTA,
    ENDED_TURNS_ARE_NOT_COUNTED,
    JOURNAL_IS_UNBOUNDED,
)
from tests.mutants.in_settling import LATE_RESULT_IS_RECORDED
from tests.scenarios.lines import PROMPT, cancel, close, distinct
from tests.scenarios.registry import scenario
from tests.sessions.recount import recount
from tests.sessions.world import OWNER, World, cancelled, turn
from tests.sim.hand_engine import Sizes


@scenario("L1", OVERSHOOT_STAYS)
def test_l1_pages_bought_for_drafts_are_not_under_the_next_turn() -> None:
    bench = Bench(Sizes(page_size=1, num_drafts=4, drafter=Drafter.MODEL))
    session_id = bench.open("s")
    history: tuple[int, ...] = ()
    for i in range(4):
        prompt = history + distinct(i, 5)
        name, base_len = f"t{i}", len(history)
        bench.step(
            bench.submit_command(
                session_id, name, prompt[base_len:], base_len=base_len, max_tokens=30
            )
        )
        while not (bench.tokens(name) and bench.batches[-1].rows[0].num_drafts):
            bench.settle()
        said = len(bench.tokens(name))
        assert bench.cache.slot(session_id).allocated_len > len(prompt) + said
        bench.step(cancel(name, said))
        bench.expect(name, prompt)
        history = prompt + tuple(bench.tokens(name))
        # The last token has no KV yet, and nothing is held for what was guessed behind it.
        assert bench.cache.slot(session_id).allocated_len == len(history) - 1
    bench.run()
    bench.close_all()


@scenario("L2", RELEASE_DROPS_TAIL)
def test_l2_a_turn_retracted_in_mid_decode_resumes_and_loses_no_page() -> None:
    bench = Bench(Sizes(num_pages=14, chunk_tokens=64))
    old, young = bench.open("old"), bench.open("young")
    bench.run(
        bench.submit_command(old, "a", distinct(1, 17), max_tokens=30),
        bench.submit_command(young, "b", distinct(2, 18), max_tokens=20),
    )
    assert bench.finished("b").num_retractions > 0
    assert bench.finished("a").num_retractions == 0
    bench.expect("a", distinct(1, 17))
    bench.expect("b", distinct(2, 18))
    bench.close_all()


@scenario("L3", QUOTE_TAKES_A_LOCK)
def test_l3_a_turn_that_asks_many_steps_for_admission_takes_one_lock() -> None:
    bench = Bench(Sizes(num_pages=10, chunk_tokens=64, num_rows=2))
    first, second = bench.open("first"), bench.open("second")
    bench.run(bench.submit_command(second, "warm", PROMPT[:9], max_tokens=1))
    bench.run(
        bench.submit_command(first, "a", distinct(1, 22), max_tokens=12),
        bench.submit_command(second, "b", PROMPT[:12], base_len=10, max_tokens=8),
    )
    bench.expect("a", distinct(1, 22))
    assert isinstance(bench.turns[TurnId("b")].end, TurnFinished)
    bench.close_all()


@scenario("L4", QUOTE_TAKES_A_LOCK)
def test_l4_a_turn_cancelled_before_it_got_a_row_leaves_nothing() -> None:
    bench = Bench(Sizes(num_rows=1, max_running=2))
    first, second = bench.open("first"), bench.open("second")
    bench.run(bench.submit_command(first, "warm", PROMPT, max_tokens=1))
    bench.step(bench.submit_command(first, "a", (7,), base_len=len(PROMPT)))
    bench.step(bench.submit_command(second, "b", PROMPT))
    assert not bench.turns[TurnId("b")].starts, "there is no row for it"
    bench.step(cancel("b", None))
    end = bench.finished("b")
    assert (end.reason, end.history_len, end.num_outputs) == (FinishReason.CANCELLED, 0, 0)
    bench.run()
    bench.close_all()


@scenario("L5", RELEASE_KEEPS_ROW)
def test_l5_a_turn_that_ends_with_its_first_forward_gives_back_row_and_pages() -> None:
    bench = Bench(Sizes(num_rows=1, max_running=1))
    for i in range(5):
        session_id = bench.open(f"s{i}")
        bench.run(bench.submit_command(session_id, f"t{i}", distinct(i, 9), max_tokens=1))
        bench.expect(f"t{i}", distinct(i, 9))
        bench.run(close(f"s{i}"))
    bench.close_all()


@scenario("L6", LATE_RESULT_IS_RECORDED)
def test_l6_a_chunk_that_lands_after_its_turn_was_cancelled_is_dropped() -> None:
    for keep in (None, 0):
        bench = Bench(Sizes(chunk_tokens=4))
        session_id = bench.open("s")
        bench.step(bench.submit_command(session_id, "t", PROMPT))
        bench.settle()
        bench.step()
        bench.step(cancel("t", keep))
        assert bench.finished("t").history_len == (0 if keep is None else len(PROMPT))
        bench.run()
        assert bench.engine.counters.overshoots > 0
        bench.close_all()


@scenario("L8", RELEASE_KEEPS_ROW)
def test_l8_three_hundred_cancelled_turns_leave_an_empty_engine() -> None:
    bench = Bench(Sizes(num_in_flight=2, max_running=8))
    sessions = [bench.open(f"s{i}") for i in range(10)]
    for i in range(300):
        name = f"t{i}"
        bench.step(bench.submit_command(sessions[i % 10], name, distinct(i, 5), max_tokens=50))
        if len(bench.runner) and i % 3:
            bench.settle()
        bench.step(cancel(name, None))
        assert bench.finished(name).reason is FinishReason.CANCELLED
    bench.run()
    bench.close_all()


@scenario("L8", ENDED_TURN_HOLDS_QUOTA)
def test_l8_three_hundred_cancelled_turns_leave_their_owner_all_of_its_quota() -> None:
    with World(quotas=QuotaLimits(owner_turns=1)) as world:
        session = world.open()
        for i in range(300):
            world.submit(session, turn(f"t{i}"))
            if i % 2:
                world.engine.step()
            world.manager.cancel(OWNER, session, f"t{i}", keep_partial=False)
            world.engine.run()
            cancelled(world.end_of(session, f"t{i}"))


@scenario("L9", CLOSED_SESSION_STAYS_IN_ENGINE, CLOSED_SESSION_HOLDS_QUOTA)
def test_l9_a_session_closed_before_the_engine_heard_of_it_is_left_nowhere() -> None:
    with World(quotas=QuotaLimits(owner_sessions=1)) as world:
        for _ in range(3):
            session = world.open(session_id="again")
            world.submit(session, turn("1"))
            assert not world.engine.slots, "the engine has not taken the open yet"
            world.manager.close(OWNER, session)
            world.engine.run()
            assert not world.engine.slots
            assert world.manager.stats().sessions == 0


@scenario("L10", LOCK_COVERS_WHOLE_EDGE, UNLOCK_FREES_THE_LAST_NODE)
def test_l10_a_lock_that_ends_inside_an_edge_is_given_back_whole() -> None:
    bench = Bench(Sizes(page_size=4, chunk_tokens=64))
    one, two, three = (bench.open(name) for name in ("one", "two", "three"))
    bench.run(bench.submit_command(one, "a", PROMPT, max_tokens=1))
    for session_id, name, shared in ((two, "b", 16), (three, "c", 8)):
        prompt = PROMPT[:shared] + distinct(shared, 9)
        bench.run(bench.submit_command(session_id, name, prompt, max_tokens=1))
        bench.expect(name, prompt)
        assert bench.finished(name).cached_tokens == shared
    bench.run(close("one"), close("two"), close("three"))
    accounts = bench.cache.accounts()[POOL]
    assert accounts.tree_protected == 0
    assert accounts.free + accounts.tree_evictable == bench.sizes.num_pages
    bench.close_all()


@scenario("L11", SECOND_TURN_IS_ADMITTED)
def test_l11_a_rejected_second_turn_does_not_keep_the_session_from_closing() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "a", PROMPT))
    bench.step(bench.submit_command(session_id, "b", PROMPT))
    assert bench.failed("b").code == "session_busy"
    bench.step(close("s"))
    assert SessionGone in [type(event) for event in bench.events]
    bench.run()
    bench.close_all()


@scenario("L12", JOURNAL_IS_UNBOUNDED, ENDED_TURNS_ARE_NOT_COUNTED)
def test_l12_what_ended_turns_leave_on_the_host_has_a_bound() -> None:
    with World(limits=SessionLimits(journal=JournalLimits(max_bytes=4096))) as world:
        session = world.open()
        journal = world.manager.journal(OWNER, session)
        for i in range(40):
            world.run(session, turn(f"t{i}", max_tokens=4))
            assert journal.num_bytes <= 4096
            recount(world.manager)
        assert all(world.end_of(session, f"t{i}").outcome.usage.output_tokens for i in range(40))
