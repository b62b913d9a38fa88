"""Products of integers with integers, as Triton programs: W8A8.

Each row of x is rounded to 8 bits by a scale of its own, while the model runs (per-token dynamic
quantization: ZeroQuant, Yao et al. 2022; SmoothQuant, Xiao et al. 2022). Products of its codes with
those of the weight, whose outputs have a scale each, are summed in int32, and scaled once: what
vLLM computes of such checkpoints (`dynamic_scaled_int8_quant`, `cutlass_scaled_mm`). Sums are
exact, so a row's result depends neither on the other rows nor on how its inputs are split.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_rows(x, codes, scales, num_inputs, BLOCK_K: tl.constexpr):
    """Round a row to 8 bits: grid (rows,).

    Ties go to the even code. A row with anything that is not finite has a scale of NaN, which its
    outputs take over.

    Args:
        x: [rows, num_inputs].
        codes: int8 [rows, num_inputs], from -127 to 127.
        scales: float32 [rows], the largest magnitude of a row / 127.
        BLOCK_K: inputs that are read at a time; a row is read twice, the second time from caches.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x += row * num_inputs + k
    codes += row * num_inputs + k
    sizes = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        numbers = tl.load(x + first, mask=first + k < num_inputs, other=0.0).to(tl.float32)
        of_numbers = tl.abs(numbers)
        # NaN is not less, and maxima would pass over it.
        of_numbers = tl.where(of_numbers < float("inf"), of_numbers, float("inf"))
        sizes = tl.maximum(sizes, of_numbers)
    # At least 2^-119: its 127th part is the least that has all bits. Zeros have it too.
    largest = tl.maximum(tl.max(sizes, 0), 1.504632769052528e-36)
    scale = tl.div_rn(largest, 127.0)
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    tl.store(scales + row, scale)
    for first in range(0, num_inputs, BLOCK_K):
        is_k = first + k < num_inputs
        numbers = tl.load(x + first, mask=is_k, other=0.0).to(tl.float32)
        # A float32 of 3 * 2^22 has the integer, in two's complement, in its last bits, and adding
        # to it rounds as integers are rounded.
        bits = (tl.div_rn(numbers, scale) + 12582912.0).to(tl.int32, bitcast=True)
        tl.store(codes + first, bits.to(tl.int8), mask=is_k)


@triton.jit
def _as_outputs(summed, scales, row_scales, bias):
    """Return what sums of products of codes stand for, float32."""
    return summed.to(tl.float32) * scales * row_scales + bias


# What differs from launch to launch is not compiled in: to compile takes a second, for everybody.
@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def multiply_integers(
    x,
    row_scales,
    codes,
    scales,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    num_blocks,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute x W^T + b for one tile, over one split of the inputs: grid (tiles of outputs, tiles
    of rows, splits).

    Args:
        x: int8 [rows, num_inputs].
        row_scales: float32 [rows].
        codes: int8 [num_outputs, num_inputs].
        scales: float32 [num_outputs].
        bias: [num_outputs], added unless there are splits.
        out: [rows, num_outputs]; with splits int32 [splits, rows, num_outputs], not yet scaled.
        num_blocks: blocks of BLOCK_K inputs that a split has.
    """
    first_n, first_m = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    split = tl.program_id(2)
    n, m = first_n + tl.arange(0, BLOCK_N), first_m + tl.arange(0, BLOCK_M)
    is_n, is_m = n < num_outputs, m < num_rows
    k = tl.arange(0, BLOCK_K)
    codes_of = codes + n.to(tl.int64)[:, None] * num_inputs + k[None, :]
    x_of = x + m.to(tl.int64)[None, :] * num_inputs + k[:, None]
    summed = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    first_block = split * num_blocks
    for index in range(
        first_block, tl.minimum(first_block + num_blocks, tl.cdiv(num_inputs, BLOCK_K))
    ):
        block = index * BLOCK_K
        is_k = block + k < num_inputs
        of_weight = tl.load(codes_of + block, mask=is_n[:, None] & is_k[None, :], other=0)
        of_rows = tl.load(x_of + block, mask=is_m[None, :] & is_k[:, None], other=0)
        summed = tl.dot(of_weight, of_rows, summed, out_dtype=tl.int32)
    out += (split.to(tl.int64) * num_rows + m)[None, :] * num_outputs + n[:, None]
    is_out = is_n[:, None] & is_m[None, :]
    if IS_SPLIT:
        tl.store(out, summed, mask=is_out)
    else:
        of_rows = tl.load(row_scales + m, mask=is_m, other=0.0)[None, :]
        of_outputs = tl.load(scales + n, mask=is_n, other=0.0)[:, None]
        added = tl.zeros((BLOCK_N,), tl.float32)
        if HAS_BIAS:
            added += tl.load(bias + n, mask=is_n, other=0.0).to(tl.float32)
        numbers = _as_outputs(summed, of_outputs, of_rows, added[:, None])
        tl.store(out, numbers.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def sum_integers(
    parts,
    row_scales,
    scales,
    bias,
    out,
    num_rows,
    num_outputs,
    num_splits,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum what the splits of one row have computed, and scale it: grid (rows, tiles of outputs).

    Args:
        parts: int32 [splits, rows, num_outputs].
        row_scales: float32 [rows].
        scales: float32 [num_outputs].
        bias: [num_outputs].
        out: [rows, num_outputs].
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = n < num_outputs
    summed = tl.zeros((BLOCK_N,), tl.int32)
    at = row * num_outputs + n
    for _ in range(num_splits):
        summed += tl.load(parts + at, mask=is_n, other=0)
        at += num_rows.to(tl.int64) * num_outputs
    added = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + n, mask=is_n, other=0.0).to(tl.float32)
    of_outputs = tl.load(scales + n, mask=is_n, other=0.0)
    numbers = _as_outputs(summed, of_outputs, tl.load(row_scales + row), added)
    tl.store(out + row * num_outputs + n, numbers.to(out.dtype.element_ty), mask=is_n)
