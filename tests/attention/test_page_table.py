"""The mirror of the page table."""

from __future__ import annotations

import numpy as np
import torch

from cache.pool.page_table import PageTable
from cache.types import PoolName, RowId, TableWrite


def write(row: int, start: int, *pages: int) -> TableWrite:
    return TableWrite(PoolName("full"), RowId(row), start, np.array(pages, dtype=np.int32))


def apply(pages: PageTable, *writes: TableWrite) -> None:
    for delta in writes:
        pages.apply(delta)


def table() -> PageTable:
    return PageTable(3, 8, device=torch.device("cpu"))


def test_an_unwritten_table_points_at_the_padding_page() -> None:
    assert not table().device_pages.any()


def test_runs_are_maximal_and_in_order() -> None:
    pages = table()
    apply(pages, write(1, 0, 4, 5, 6, 2, 3, 9))
    assert pages.runs(1, 6) == ((4, 3), (2, 2), (9, 1))
    assert pages.runs(1, 2) == ((4, 2),)


def test_a_write_changes_the_runs_of_its_row_only() -> None:
    pages = table()
    apply(pages, write(1, 0, 4, 5), write(2, 0, 6, 7))
    assert pages.runs(1, 2) == ((4, 2),)
    assert pages.runs(2, 2) == ((6, 2),)
    apply(pages, write(1, 1, 9))
    assert pages.runs(1, 2) == ((4, 1), (9, 1))
    assert pages.runs(2, 2) == ((6, 2),)


def test_the_later_write_of_a_batch_wins_on_host_and_device() -> None:
    pages = table()
    apply(pages, write(3, 2, 7, 8), write(3, 3, 5))
    assert pages.pages(3, 4).tolist() == [0, 0, 7, 5]
    assert pages.device_pages[3, :4].tolist() == [0, 0, 7, 5]


def test_runs_may_begin_behind_entries_that_are_gone() -> None:
    pages = table()
    apply(pages, write(1, 0, 0, 0, 6, 7, 3))
    assert pages.runs(1, 5, first=2) == ((6, 2), (3, 1))
    assert pages.runs(1, 5, first=3) == ((7, 1), (3, 1))
    assert pages.pages(1, 5, first=2).tolist() == [6, 7, 3]
