"""D: what is given back twice, or counted twice."""

from __future__ import annotations

import pytest

from cache.errors import AuditFailed
from cache.ledger import Ledger
from cache.pages import Extents, PageAllocator
from cache.types import Holder
from session_server.core.events import FinishReason, TurnFailed, TurnFinished
from tests.cache.free_lists import free_pages
from tests.engine.bench import POOL, Bench
from tests.mutants.guards import DOUBLE_FREE_PASSES, SENTINEL_PASSES
from tests.mutants.in_books import PADDING_PAGE_IS_FREE
from tests.mutants.in_leases import LAST_TOKEN_IS_PUBLISHED, LENT_PAGES_STAY_HELD
from tests.mutants.in_scheduling import CANCELLED_TURN_IS_FOUND
from tests.mutants.in_settling import LATE_RESULT_IS_RECORDED
from tests.scenarios.lines import PROMPT, cancel
from tests.scenarios.registry import scenario
from tests.sim.hand_engine import Sizes


@scenario("D1", LATE_RESULT_IS_RECORDED)
def test_d1_the_overshoot_of_a_finished_turn_frees_nothing_twice() -> None:
    bench = Bench(Sizes(page_size=1))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "probe", PROMPT, max_tokens=6))
    said = bench.tokens("probe")
    stop = next(t for t in said if said.index(t) >= 2)
    bench.run(
        bench.submit_command(
            session_id, "t", PROMPT, base_len=0, max_tokens=50, stop_token_ids=(stop,)
        )
    )
    end = bench.finished("t")
    assert (end.reason, end.matched_token) == (FinishReason.STOP, stop)
    assert bench.tokens("t") == said[: said.index(stop) + 1]
    assert bench.engine.counters.overshoots == 1
    bench.close_all()


@scenario("D2", CANCELLED_TURN_IS_FOUND)
def test_d2_a_turn_cancelled_in_flight_is_not_finished_by_its_result() -> None:
    bench = Bench()
    session_id = bench.open("s")
    bench.step(bench.submit_command(session_id, "t", PROMPT[:4], max_tokens=1))
    bench.step(cancel("t", 0))
    bench.run()
    ends = [e for e in bench.events if isinstance(e, TurnFinished | TurnFailed)]
    assert [end.turn_id for end in ends] == ["t"]
    bench.close_all()


@scenario("D3", DOUBLE_FREE_PASSES)
def test_d3_a_page_named_twice_is_not_given_back_once_too_often() -> None:
    allocator = PageAllocator(Ledger(POOL, 9), Extents)
    one, two, three = allocator.acquire(3, Holder.ACTIVE)
    allocator.release([three], Holder.ACTIVE)
    for pages in ([two, one, two], [one, three]):
        with pytest.raises(AuditFailed):
            allocator.release(pages, Holder.ACTIVE)
        assert allocator.ledger.num_free == len(free_pages(allocator)) == 6
    allocator.release([one, two], Holder.ACTIVE)
    assert free_pages(allocator).tolist() == list(range(1, 9))


@scenario("D4", SENTINEL_PASSES)
def test_d4_neither_the_padding_page_nor_a_sentinel_is_given_back() -> None:
    allocator = PageAllocator(Ledger(POOL, 9), Extents)
    held = allocator.acquire(8, Holder.ACTIVE)
    for sentinel in (0, -1):
        with pytest.raises(AuditFailed):
            allocator.release([*held[:2], sentinel], Holder.ACTIVE)
        assert allocator.ledger.num_free == len(free_pages(allocator)) == 0


@scenario("D4", PADDING_PAGE_IS_FREE)
def test_d4_the_padding_page_is_nobody_s_even_when_the_pool_is_full() -> None:
    bench = Bench(Sizes(num_pages=10, max_context_len=64))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "t", PROMPT, max_tokens=20))
    bench.expect("t", PROMPT)
    assert bench.cache.accounts()[POOL].free == 0
    bench.close_all()


@scenario("D6", LAST_TOKEN_IS_PUBLISHED)
def test_d6_a_page_is_published_once_when_all_its_tokens_are_computed() -> None:
    bench = Bench(Sizes(page_size=4))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "a", PROMPT[:5], max_tokens=3))
    history = PROMPT[:5] + tuple(bench.tokens("a"))
    accounts = bench.cache.accounts()[POOL]
    # Eight tokens, and the last one has no KV: its page is not the tree's yet.
    assert (accounts.tree_protected, accounts.session_held) == (1, 1)
    replaced = (*history[:7], 1 + history[7] % 30)
    bench.run(bench.submit_command(session_id, "b", replaced[7:], base_len=7, max_tokens=1))
    bench.expect("b", replaced)
    accounts = bench.cache.accounts()[POOL]
    assert (accounts.tree_protected, accounts.tree_evictable, accounts.session_held) == (2, 0, 0)
    bench.close_all()


@scenario("D7", LENT_PAGES_STAY_HELD)
def test_d7_a_session_s_pages_are_its_turn_s_while_one_runs_and_never_both() -> None:
    bench = Bench(Sizes(page_size=4, chunk_tokens=64))
    session_id = bench.open("s")
    bench.run(bench.submit_command(session_id, "a", PROMPT[:6], max_tokens=1))
    assert held_and_active(bench) == (1, 0)
    bench.step(bench.submit_command(session_id, "b", (9, 9), base_len=7, max_tokens=30))
    assert held_and_active(bench) == (0, 2)
    bench.step(cancel("b", None))
    assert held_and_active(bench) == (1, 0)
    bench.run()
    bench.close_all()


def held_and_active(bench: Bench) -> tuple[int, int]:
    """Private pages of idle sessions, and of running turns."""
    accounts = bench.cache.accounts()[POOL]
    return accounts.session_held, accounts.active
