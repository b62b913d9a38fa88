"""Products of rows with weights that are codes, as Triton programs.

Where there are too few tiles to fill a device, the inputs are split among programs, and a second
kernel sums their results in order (split-K).
"""

from __future__ import annotations

import triton
import triton.language as tl

from session_server.runner.triton.code_kernels import times_codes


# What differs from launch to launch is not compiled in: to compile takes a second, for everybody.
@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def multiply_codes(
    x,
    codes,
    scales,
    minimums,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    width,
    num_blocks,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute x W^T + b for one tile, over one split of the inputs: grid (tiles of outputs, tiles
    of rows, splits).

    Args:
        x: [rows, num_inputs].
        codes, scales, minimums, FORMAT, DOT_DTYPE: see `times_codes`.
        bias: [num_outputs], added unless there are splits.
        out: [rows, num_outputs]; with splits float32 [splits, rows, num_outputs].
        num_blocks: blocks of BLOCK_K bytes of a row of codes that a split has.
    """
    first_n, first_m = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    split = tl.program_id(2)
    n, m = first_n + tl.arange(0, BLOCK_N), first_m + tl.arange(0, BLOCK_M)
    is_n, is_m = n < num_outputs, m < num_rows
    first_block = split * num_blocks
    summed = times_codes(
        x + m.to(tl.int64) * num_inputs,
        is_m,
        num_inputs,
        codes,
        scales,
        minimums,
        n,
        is_n,
        num_outputs,
        width,
        first_block,
        tl.minimum(first_block + num_blocks, width // BLOCK_K),
        FORMAT,
        DOT_DTYPE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_BIAS and not IS_SPLIT:
        summed += tl.load(bias + n, mask=is_n, other=0.0).to(tl.float32)[:, None]
    out += (split.to(tl.int64) * num_rows + m)[None, :] * num_outputs + n[:, None]
    tl.store(out, summed.to(out.dtype.element_ty), mask=is_n[:, None] & is_m[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def sum_splits(
    parts,
    bias,
    out,
    num_rows,
    num_outputs,
    num_splits,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum what the splits of one row have computed, in their order: grid (rows, tiles of outputs).

    Args:
        parts: float32 [splits, rows, num_outputs].
        bias: [num_outputs].
        out: [rows, num_outputs].
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = n < num_outputs
    summed = tl.zeros((BLOCK_N,), tl.float32)
    at = row * num_outputs + n
    for _ in range(num_splits):
        summed += tl.load(parts + at, mask=is_n, other=0.0)
        at += num_rows.to(tl.int64) * num_outputs
    if HAS_BIAS:
        summed += tl.load(bias + n, mask=is_n, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + n, summed.to(out.dtype.element_ty), mask=is_n)
