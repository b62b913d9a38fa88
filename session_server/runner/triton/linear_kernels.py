"""Products of rows with weights that are codes, as Triton programs.

A program computes some rows of x times some outputs of the weight (W4A16 and W8A16 of Marlin;
Frantar et al. 2024): codes become numbers of the activations' dtype in registers, just before the
product. The weight is its left operand, because the outputs fill a matrix instruction, and the few
rows of a decode step do not. Where there are too few tiles to fill a device, the inputs are split
among programs, and a second kernel sums their results in order (split-K).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _as_numbers(codes, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr):
    """Return 8-bit floats, or unsigned codes of up to 8 bits less their zero, in float32. A float32
    of 2^23 has the integer in its last bits: conversions of integers are a quarter as fast."""
    if IS_FLOAT:
        return codes.to(tl.float32)
    else:
        bits = codes.to(tl.int32) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _scaled(
    numbers,
    scales,
    minimums,
    first_group,
    num_outputs,
    n,
    HAS_MINIMUMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return scale * number - minimum; scales of numbers [BLOCK_N, BLOCK_K] are shared by GROUP
    inputs. Groups beyond the last have scales of zero."""
    is_n = n < num_outputs
    if GROUP >= BLOCK_K:  # 8-bit floats, which have no minimums
        of_outputs = tl.load(scales + first_group * num_outputs + n, mask=is_n, other=0.0)
        return numbers * of_outputs[:, None]
    else:
        NUM_GROUPS: tl.constexpr = BLOCK_K // GROUP
        at = (first_group + tl.arange(0, NUM_GROUPS))[None, :] * num_outputs + n[:, None]
        by_group = tl.reshape(numbers, (BLOCK_N, NUM_GROUPS, GROUP))
        of_groups = tl.load(scales + at, mask=is_n[:, None], other=0.0).to(tl.float32)
        by_group *= of_groups[:, :, None]
        if HAS_MINIMUMS:
            of_groups = tl.load(minimums + at, mask=is_n[:, None], other=0.0).to(tl.float32)
            by_group -= of_groups[:, :, None]
        return tl.reshape(by_group, (BLOCK_N, BLOCK_K))


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
    IS_PACKED: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute x W^T + b for one tile, over one split of the inputs: grid (tiles of outputs, tiles
    of rows, splits).

    Args:
        x: [rows, num_inputs].
        codes: [num_outputs, width], the width a multiple of BLOCK_K: 8-bit floats if IS_FLOAT, else
            uint8. Integers of 8 bits are stored plus 128; of 4 bits, a byte has the code of input k
            in its low half and the code of input width + k in its high half.
        scales, minimums: [inputs / GROUP, num_outputs], of all inputs that there are codes of.
        bias: [num_outputs], added unless there are splits.
        out: [rows, num_outputs]; with splits float32 [splits, rows, num_outputs].
        num_blocks: blocks of BLOCK_K bytes of a row of codes that a split has.
        DOT_DTYPE: in which products are computed; they are summed up in float32.
    """
    first_n, first_m = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    split = tl.program_id(2)
    n, m = first_n + tl.arange(0, BLOCK_N), first_m + tl.arange(0, BLOCK_M)
    is_n, is_m = n < num_outputs, m < num_rows
    k = tl.arange(0, BLOCK_K)
    codes_of = codes + n.to(tl.int64)[:, None] * width + k[None, :]
    x_of = x + m.to(tl.int64)[None, :] * num_inputs + k[:, None]
    summed = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first_block = split * num_blocks
    for index in range(first_block, tl.minimum(first_block + num_blocks, width // BLOCK_K)):
        block = index * BLOCK_K
        stored = tl.load(codes_of + block, mask=is_n[:, None], other=0.0)
        is_x = is_m[None, :] & (block + k < num_inputs)[:, None]
        rows = tl.load(x_of + block, mask=is_x, other=0.0).to(DOT_DTYPE)
        numbers = _as_numbers(
            stored & 15 if IS_PACKED else stored, 0 if IS_PACKED else 128, IS_FLOAT
        )
        weight = _scaled(
            numbers,
            scales,
            minimums,
            block // GROUP,
            num_outputs,
            n,
            HAS_MINIMUMS,
            GROUP,
            BLOCK_N,
            BLOCK_K,
        )
        summed = tl.dot(weight.to(DOT_DTYPE), rows, summed, input_precision="ieee")
        if IS_PACKED:
            is_x = is_m[None, :] & (width + block + k < num_inputs)[:, None]
            rows = tl.load(x_of + width + block, mask=is_x, other=0.0).to(DOT_DTYPE)
            weight = _scaled(
                _as_numbers(stored >> 4, 0, IS_FLOAT),
                scales,
                minimums,
                (width + block) // GROUP,
                num_outputs,
                n,
                HAS_MINIMUMS,
                GROUP,
                BLOCK_N,
                BLOCK_K,
            )
            summed = tl.dot(weight.to(DOT_DTYPE), rows, summed, input_precision="ieee")
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
