"""Choose how many rows a program takes, and how many threads."""

from __future__ import annotations

from typing import Final

import triton

NUM_ELEMENTS: Final = 1024
"""Of a block of small rows: few, because a decode step has few rows and many multiprocessors."""

ELEMENTS_OF_WARP: Final = 512
"""16 of each thread: eight elements of a half are one load, and registers hold a few such rows."""

MAX_WARPS: Final = 16


def block_of(size: int, largest: int | None = None) -> dict[str, int]:
    """Return BLOCK_M rows, BLOCK_N columns, and warps for rows of `size` elements.

    `largest`: columns of a block, if rows may be cut.
    """
    columns = triton.next_power_of_2(size)
    if largest is not None:
        columns = min(columns, largest)
    rows = max(1, NUM_ELEMENTS // columns)
    num_warps = min(MAX_WARPS, max(1, rows * columns // ELEMENTS_OF_WARP))
    return {"BLOCK_M": rows, "BLOCK_N": columns, "num_warps": num_warps}
