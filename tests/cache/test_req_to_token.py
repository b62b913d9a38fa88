"""Rows and the host page table."""

from __future__ import annotations

import pytest

from cache.errors import AuditFailed, OutOfRows
from cache.req_to_token import ReqToTokenPool
from cache.types import NULL_ROW, PoolName

POOL = PoolName("full")


@pytest.fixture
def rows() -> ReqToTokenPool:
    return ReqToTokenPool(num_rows=3, row_pages=8, pools=[POOL])


def test_N_advertised_rows_serve_N_and_row_0_is_padding(rows: ReqToTokenPool) -> None:
    assert sorted(rows.alloc() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(OutOfRows):
        rows.alloc()
    assert rows.num_free == 0


def test_A4_the_padding_row_is_never_written(rows: ReqToTokenPool) -> None:
    with pytest.raises(AuditFailed):
        rows.write(POOL, NULL_ROW, 0, [5])
    assert not rows.entries(POOL, NULL_ROW).any()


def test_a_write_is_also_a_delta_for_the_device(rows: ReqToTokenPool) -> None:
    row = rows.alloc()
    write = rows.write(POOL, row, 2, [7, 9])
    assert (write.pool, write.row, write.start, write.pages.tolist()) == (POOL, row, 2, [7, 9])
    assert rows.entries(POOL, row)[:5].tolist() == [0, 0, 7, 9, 0]


def test_a_delta_does_not_change_with_the_table(rows: ReqToTokenPool) -> None:
    row = rows.alloc()
    write = rows.write(POOL, row, 0, [7])
    rows.repoint(POOL, row, 0, [8])
    assert write.pages.tolist() == [7]


def test_L1_a_live_entry_is_never_overwritten(rows: ReqToTokenPool) -> None:
    row = rows.alloc()
    rows.write(POOL, row, 0, [4, 5])
    with pytest.raises(AuditFailed, match="live entry"):
        rows.write(POOL, row, 1, [6])
    assert rows.entries(POOL, row)[:2].tolist() == [4, 5]


def test_only_live_entries_are_repointed(rows: ReqToTokenPool) -> None:
    row = rows.alloc()
    rows.write(POOL, row, 0, [4])
    with pytest.raises(AuditFailed):
        rows.repoint(POOL, row, 0, [6, 7])


def test_nothing_is_written_past_a_row(rows: ReqToTokenPool) -> None:
    row = rows.alloc()
    with pytest.raises(AuditFailed):
        rows.write(POOL, row, 7, [1, 2])


def test_a_row_that_names_pages_is_not_freed(rows: ReqToTokenPool) -> None:
    row = rows.alloc()
    rows.write(POOL, row, 0, [4])
    with pytest.raises(AuditFailed):
        rows.free(row)
    rows.clear(POOL, row, 0, 1)
    rows.free(row)
    assert rows.num_free == 3


def test_a_row_is_freed_once_and_then_nobody_writes_it(rows: ReqToTokenPool) -> None:
    row = rows.alloc()
    rows.free(row)
    with pytest.raises(AuditFailed):
        rows.free(row)
    with pytest.raises(AuditFailed):
        rows.write(POOL, row, 0, [4])
