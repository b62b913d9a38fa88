"""Pages on the CPU that are read as fp32, and rows that lie on given ones of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cache.pool.page_table import PageTable
from cache.pool.storage import PageFormat
from cache.types import PoolName, RowId, TableWrite

CPU = torch.device("cpu")


def cpu_pages(num_pages: int, page_size: int, stored: torch.dtype) -> PageFormat:
    """Pages that are stored as `stored`."""
    return PageFormat(
        num_pages=num_pages, page_size=page_size, dtype=stored, read_dtype=torch.float32, device=CPU
    )


def table_of(pool: PoolName, pages: list[list[int]]) -> PageTable:
    """Rows from 1 on, each on its pages."""
    table = PageTable(len(pages), max(map(len, pages)), device=CPU)
    for row, of_row in enumerate(pages, 1):
        table.apply(TableWrite(pool, RowId(row), 0, np.array(of_row, dtype=np.int32)))
    return table


def slots_of(pages: list[list[int]], page_size: int) -> list[Tensor]:
    """int64 [n] of every row: where its positions lie, in order."""
    return [
        torch.tensor([page * page_size + i for page in of_row for i in range(page_size)])
        for of_row in pages
    ]
