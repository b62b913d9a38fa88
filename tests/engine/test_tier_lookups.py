"""What counts as a search for KV outside of the pools: one that could find some, once."""

from __future__ import annotations

from session_server.core.commands import CoolSession, WarmSession
from tests.engine.bench import Bench
from tests.engine.test_tiers import MIB, PROMPT_LEN, counts, first_turns, leave, second_turns
from tests.scenarios.lines import distinct
from tests.sim.hand_engine import Sizes


def searches(bench: Bench) -> tuple[int, int]:
    return counts(bench).lookups, counts(bench).hits


def test_first_turns_of_new_sessions_are_no_searches() -> None:
    bench = Bench(Sizes(host_kv_bytes=MIB))
    first_turns(bench, 4)
    assert searches(bench) == (0, 0)
    bench.close_all()


def test_a_session_that_is_copied_back_was_searched_for_once() -> None:
    bench = Bench(Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB))
    histories = first_turns(bench, 2)
    leave(bench, histories)
    second_turns(bench, histories)
    assert searches(bench) == (2, 2)
    bench.close_all()


def test_a_warmed_session_is_searched_for_no_more() -> None:
    bench = Bench(Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB))
    histories = first_turns(bench, 1)
    leave(bench, histories)
    for session_id in histories:
        bench.run(WarmSession(session_id=session_id))
        bench.run(WarmSession(session_id=session_id))
    second_turns(bench, histories)
    assert searches(bench) == (1, 1)
    bench.close_all()


def test_a_cold_session_that_is_in_the_pools_is_not_searched_for() -> None:
    bench = Bench(Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB))
    histories = first_turns(bench, 1)
    bench.run(*(CoolSession(session_id=session_id) for session_id in histories))
    assert second_turns(bench, histories) >= PROMPT_LEN - 2 * bench.sizes.page_size
    assert searches(bench) == (0, 0)
    bench.close_all()


def test_a_session_whose_kv_is_nowhere_was_searched_for_once_in_vain() -> None:
    bench = Bench(Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB))
    histories = first_turns(bench, 1)
    leave(bench, histories)
    bench.engine.inspect().tiers.clear()
    (session_id, history), *_ = histories.items()
    new = distinct(100, 3)
    bench.run(bench.submit_command(session_id, "second", new, base_len=len(history)))
    bench.expect("second", history + new)
    assert searches(bench) == (1, 0)
    bench.close_all()
