"""Level 1 of the memory check reads what a turn touched, on every layout, however long the history
is; what lies before it is left to the recount."""

from __future__ import annotations

import numpy as np
import pytest

from cache.checker import find_violations
from cache.req_to_token import ReqToTokenPool
from cache.session_cache import SessionAwareCache
from cache.types import NULL_PAGE, PageId, SessionId
from tests.cache.audit import audit
from tests.cache.damage import lease_of
from tests.cache.kv_world import MIXTURES, NAMESPACES, Mixture, make_cache
from tests.cache.plain_turns import run_turn
from tests.cache.work import count_calls

SESSION = SessionId("s")


def make_parked(mixture: Mixture, page_size: int, history_len: int) -> SessionAwareCache:
    """One session of so many tokens, whose last turn had seven."""
    num_pages = history_len // page_size + 64
    cache = make_cache(
        page_size, num_pages=num_pages, max_context_len=history_len + 64, mixture=mixture
    )
    cache.open(SESSION, namespace=NAMESPACES[0])
    run_turn(cache, SESSION, [index % 3 for index in range(history_len)])
    run_turn(cache, SESSION, [1, 2, 0, 1, 2, 0, 1])
    return cache


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_what_the_check_of_a_turn_costs_does_not_grow_with_the_history(
    mixture: Mixture, page_size: int
) -> None:
    def cost(history_len: int) -> int:
        cache = make_parked(mixture, page_size, history_len)
        return count_calls(lambda: find_violations(cache, 1, SESSION))

    assert cost(16_000) == cost(1_600) < 400


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_what_a_turn_costs_does_not_grow_with_the_history(mixture: Mixture, page_size: int) -> None:
    def cost(history_len: int) -> int:
        cache = make_parked(mixture, page_size, history_len)
        return count_calls(lambda: run_turn(cache, SESSION, [2, 1, 0, 0, 1, 2, 2]))

    assert abs(cost(16_000) - cost(1_600)) < 10


@pytest.mark.parametrize("mixture", ["full", "latent", "full + window"])
def test_level_1_reads_the_row_from_what_the_turn_touched_on(mixture: Mixture) -> None:
    cache = make_parked(mixture, 4, 400)
    pool, lease = cache.inspect().stores.components[0].pool, lease_of(cache, SESSION)
    table = cache.inspect().stores.rows._tables[pool]
    for entry, is_seen in ((3, False), (90, False), (100, True), (101, True)):
        page, table[lease.row, entry] = table[lease.row, entry], PageId(1)
        assert bool(find_violations(cache, 1, SESSION)) == is_seen, entry
        assert find_violations(cache, 2), "a recount reads all of it"
        table[lease.row, entry] = page
    audit(cache)


@pytest.mark.parametrize("mixture", ["window", "full + window"])
def test_a_page_of_the_window_that_the_row_does_not_name_is_reported(mixture: Mixture) -> None:
    cache = make_parked(mixture, 4, 400)
    pool, lease = cache.inspect().stores.components[-1].pool, lease_of(cache, SESSION)
    cache.inspect().stores.rows._tables[pool][lease.row, lease.num_pages - 1] = NULL_PAGE
    texts = [violation.text for violation in find_violations(cache, 1, SESSION)]
    assert any("a page that the next forward reads is not kept" in text for text in texts), texts


def test_a_row_knows_which_entries_changed_since_it_was_asked_to() -> None:
    (pool,) = (group.pool for group in MIXTURES["full"])
    rows = ReqToTokenPool(num_rows=2, row_pages=8, pools=[pool])
    row = rows.alloc()
    rows.write(pool, row, 0, [3, 4, 5])
    assert rows.changed(row) == (0, 3)
    rows.begin_changes(row)
    start, end = rows.changed(row)
    assert start >= end
    rows.repoint(pool, row, 1, [6])
    rows.clear(pool, row, 2, 3)
    assert rows.changed(row) == (1, 3)
    assert rows.written_end(row) == 3
    assert np.array_equal(rows.entries(pool, row)[:4], [3, 6, 0, 0])
