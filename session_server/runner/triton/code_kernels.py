"""Products with weights that are codes, for the kernels of linears and of experts.

A program computes some rows of x times some outputs of the weight (W4A16 and W8A16 of Marlin;
Frantar et al. 2024): codes become numbers of the activations' dtype in registers, just before the
product. The weight is its left operand, because the outputs fill a matrix instruction, and the few
rows of a decode step do not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from session_server.models.layers.block_weight import BLOCK, FP8_BLOCK

GROUP = tl.constexpr(BLOCK)
"""Inputs that share a scale and a minimum among integers."""

FP8_GROUP = tl.constexpr(FP8_BLOCK)
"""Inputs that share a scale among 8-bit floats, a multiple of every BLOCK_K."""


@triton.jit
def times_codes(
    x_of,
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
    end_block,
    FORMAT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products, float32 [BLOCK_N, BLOCK_M], of some outputs and some rows of x.

    Args:
        x_of: [BLOCK_M], pointers to rows of `num_inputs` numbers; `is_m`: which there are.
        codes: [num_outputs, width], the width a multiple of BLOCK_K: 8-bit floats if FORMAT is
            "fp8", else uint8. Integers of 8 bits are stored plus 128; of 4 bits, a byte has the
            code of input k in its low half and the code of input width + k in its high half.
        scales, minimums: [groups, num_outputs], of all inputs that there are codes of.
        n, is_n: [BLOCK_N], outputs, and which there are.
        first_block, end_block: from where to where of a row of codes, in BLOCK_K bytes.
        FORMAT: a `CodeFormat`.
        DOT_DTYPE: in which products are computed; they are summed up in float32.
    """
    IS_PACKED: tl.constexpr = FORMAT == "int4" or FORMAT == "int4 without minimums"  # noqa: PLR1714
    k = tl.arange(0, BLOCK_K)
    codes_of = codes + n.to(tl.int64)[:, None] * width + k[None, :]
    x_of = x_of[None, :] + k[:, None]
    summed = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for index in range(first_block, end_block):
        block = index * BLOCK_K
        stored = tl.load(codes_of + block, mask=is_n[:, None], other=0.0)
        is_x = is_m[None, :] & (block + k < num_inputs)[:, None]
        rows = tl.load(x_of + block, mask=is_x, other=0.0).to(DOT_DTYPE)
        numbers = _as_numbers(stored & 15 if IS_PACKED else stored, FORMAT)
        weight = _scaled(
            numbers, scales, minimums, block, num_outputs, n, is_n, FORMAT, BLOCK_N, BLOCK_K
        )
        summed = tl.dot(weight.to(DOT_DTYPE), rows, summed, input_precision="ieee")
        if IS_PACKED:
            high = width + block
            is_x = is_m[None, :] & (high + k < num_inputs)[:, None]
            rows = tl.load(x_of + high, mask=is_x, other=0.0).to(DOT_DTYPE)
            numbers = _as_numbers(stored >> 4, FORMAT)
            weight = _scaled(
                numbers, scales, minimums, high, num_outputs, n, is_n, FORMAT, BLOCK_N, BLOCK_K
            )
            summed = tl.dot(weight.to(DOT_DTYPE), rows, summed, input_precision="ieee")
    return summed


@triton.jit
def _as_numbers(codes, FORMAT: tl.constexpr):
    """Return 8-bit floats, or unsigned codes of up to 8 bits less their zero, in float32. A float32
    of 2^23 has the integer in its last bits: conversions of integers are a quarter as fast."""
    if FORMAT == "fp8":
        return codes.to(tl.float32)
    else:
        bits = codes.to(tl.int32) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - (8388736.0 if FORMAT == "int8" else 8388608.0)


@triton.jit
def _scaled(
    numbers,
    scales,
    minimums,
    first,
    num_outputs,
    n,
    is_n,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return scale * number - minimum of numbers [BLOCK_N, BLOCK_K], from input `first` on. Groups
    beyond the last have scales of zero."""
    if FORMAT == "fp8":
        at = first // FP8_GROUP * num_outputs + n
        return numbers * tl.load(scales + at, mask=is_n, other=0.0)[:, None]
    else:
        NUM_GROUPS: tl.constexpr = BLOCK_K // GROUP
        at = (first // GROUP + tl.arange(0, NUM_GROUPS))[None, :] * num_outputs + n[:, None]
        by_group = tl.reshape(numbers, (BLOCK_N, NUM_GROUPS, GROUP))
        of_groups = tl.load(scales + at, mask=is_n[:, None], other=0.0).to(tl.float32)
        by_group *= of_groups[:, :, None]
        if FORMAT == "int4":
            of_groups = tl.load(minimums + at, mask=is_n[:, None], other=0.0).to(tl.float32)
            by_group -= of_groups[:, :, None]
        return tl.reshape(by_group, (BLOCK_N, BLOCK_K))
