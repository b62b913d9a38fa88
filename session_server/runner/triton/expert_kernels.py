"""A mixture of experts as Triton programs: every expert of a layer in one launch.

A choice is one expert of one token: choice c is of token c // TOP_K. A program multiplies a tile of
choices that went to the same expert, so an expert's last tile may have empty rows. Which tiles
there are is told on the device: a launch has a program for each that there could be, and those
beyond return at once (the padding to blocks is that of MegaBlocks, Gale et al. 2022, and of vLLM's
`moe_align_block_size`). Nothing is added up in an order that changes from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from session_server.runner.triton.code_kernels import times_codes

ALL = tl.constexpr(tl.PropagateNan.ALL)
"""Bounds do not hide NaN, by which a row whose numbers are lost is found."""

GROUP_TILES = tl.constexpr(8)
"""Tiles whose programs follow each other for all columns: they find in the cache what they share,
be it inputs or weights."""

SCALED = tl.constexpr(32)
"""Inputs that share a scale in MXFP4."""


# What differs from launch to launch is not compiled in: to compile takes a second, for everybody.
@triton.jit(do_not_specialize=["num_choices", "max_tiles"])
def lay_out_choices(
    topk_ids,
    choices,
    experts,
    num_choices,
    max_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Lay out the choices in tiles of one expert each: grid (experts,).

    Args:
        topk_ids: int64 [choices].
        choices: int32 [max_tiles * BLOCK_M], written: by tile the choices of its rows, in
            ascending order; `num_choices` in rows that are empty.
        experts: int32 [max_tiles + 1], written: of each tile; and at last the number of tiles.
    """
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    counts = tl.full((BLOCK_E,), 0, tl.int32)
    for start in range(0, num_choices, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ids = tl.load(topk_ids + n, mask=n < num_choices, other=0).to(tl.int32)
        counts += tl.histogram(ids, BLOCK_E, mask=n < num_choices)
    first = tl.sum(tl.where(e < expert, (counts + BLOCK_M - 1) // BLOCK_M, 0), 0)

    row = first * BLOCK_M
    for start in range(0, num_choices, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ids = tl.load(topk_ids + n, mask=n < num_choices, other=-1).to(tl.int32)
        is_own = (ids == expert).to(tl.int32)
        tl.store(choices + row + tl.cumsum(is_own, 0) - 1, n, mask=is_own > 0)
        row += tl.sum(is_own, 0)
    end = (row + BLOCK_M - 1) // BLOCK_M
    empty = row + tl.arange(0, BLOCK_M)
    tl.store(choices + empty, num_choices, mask=empty < end * BLOCK_M)
    for start in range(first, end, BLOCK_E):
        tl.store(experts + start + e, expert, mask=start + e < end)
    if expert == NUM_EXPERTS - 1:
        tl.store(experts + max_tiles, end)


@triton.jit(do_not_specialize=["num_choices", "max_tiles"])
def gate_up_experts(
    x,
    weights,
    scales,
    minimums,
    biases,
    gated,
    choices,
    experts,
    num_choices,
    max_tiles,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply by gate and up, and combine both: grid (max_tiles * blocks of INNER,).

    Args:
        x: [tokens, HIDDEN].
        weights: [experts, 2 * INNER, WIDTH], the gate's rows first: numbers, of which HIDDEN are
            WIDTH; of MXFP4 uint8, two codes to a byte; or codes of each expert for `times_codes`.
        scales, minimums: uint8 [experts, 2 * INNER, NUM_GROUPS] of MXFP4, or [experts, NUM_GROUPS,
            2 * INNER] for `times_codes`; unused of numbers.
        biases: [experts, 2 * INNER], unless HAS_BIAS is false.
        gated: [choices, INNER], written.
        choices, experts: see `lay_out_choices`.
        GATE: the name of a `GateKind`; ALPHA, LIMIT: see `GateConfig`.
        FORMAT: an `ExpertFormat`.
        DOT_DTYPE: in which numbers are multiplied; products are summed up in float32.
    """
    tile, block, is_there = _place(experts, max_tiles, (INNER + BLOCK_N - 1) // BLOCK_N)
    if not is_there:
        return
    expert = tl.load(experts + tile).to(tl.int64)
    of_rows = tl.load(choices + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    x_rows = x + (tl.minimum(of_rows, num_choices - 1) // TOP_K).to(tl.int64) * HIDDEN
    weights += expert * 2 * INNER * WIDTH
    scales += expert * 2 * INNER * NUM_GROUPS
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    # What is beyond the last is multiplied once more, and not stored.
    of_gate = tl.minimum(columns, INNER - 1)
    of_up = of_gate + INNER

    if FORMAT != "numbers" and FORMAT != "mxfp4":  # noqa: PLR1714, for Triton to read
        side, column = tl.arange(0, 2 * BLOCK_N) // BLOCK_N, tl.arange(0, 2 * BLOCK_N) % BLOCK_N
        column += block * BLOCK_N
        both = times_codes(
            x_rows,
            of_rows < num_choices,
            HIDDEN,
            weights,
            scales,
            minimums + expert * 2 * INNER * NUM_GROUPS,
            side * INNER + column,
            column < INNER,
            2 * INNER,
            WIDTH,
            0,
            WIDTH // BLOCK_K,
            FORMAT,
            DOT_DTYPE,
            BLOCK_M,
            2 * BLOCK_N,
            BLOCK_K,
        )
        gate, up = tl.split(tl.permute(tl.reshape(both, (2, BLOCK_N, BLOCK_M)), (2, 1, 0)))
    else:
        gate = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        up = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            is_k = (k < HIDDEN) | (HIDDEN % BLOCK_K == 0)
            rows = tl.load(x_rows[:, None] + k[None, :], mask=is_k[None, :], other=0.0)
            if FORMAT == "mxfp4":
                gate = _add_mxfp4(gate, rows, weights, scales, of_gate, start, HIDDEN, BLOCK_K)
                up = _add_mxfp4(up, rows, weights, scales, of_up, start, HIDDEN, BLOCK_K)
            else:
                rows = rows.to(DOT_DTYPE)
                at = weights + of_gate[None, :] * HIDDEN + k[:, None]
                matrix = tl.load(at, mask=is_k[:, None], other=0.0).to(DOT_DTYPE)
                gate = tl.dot(rows, matrix, gate, input_precision="ieee")
                other = tl.load(at + INNER * HIDDEN, mask=is_k[:, None], other=0.0).to(DOT_DTYPE)
                up = tl.dot(rows, other, up, input_precision="ieee")
    if HAS_BIAS:
        biases += expert * 2 * INNER
        gate += tl.load(biases + of_gate).to(tl.float32)[None, :]
        up += tl.load(biases + of_up).to(tl.float32)[None, :]
    if GATE == "clamped":
        gate = tl.minimum(gate, LIMIT, propagate_nan=ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=ALL) + 1.0
        mixed = gate * tl.sigmoid(ALPHA * gate) * up
    elif GATE == "gelu_tanh":  # tanh(x) = 2 sigmoid(2 x) - 1
        inside = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        mixed = gate * tl.sigmoid(2.0 * inside) * up
    else:
        mixed = gate * tl.sigmoid(gate) * up
    tl.store(
        gated + of_rows.to(tl.int64)[:, None] * INNER + columns[None, :],
        mixed.to(gated.dtype.element_ty),
        mask=(of_rows < num_choices)[:, None] & (columns < INNER)[None, :],
    )


@triton.jit(do_not_specialize=["num_choices", "max_tiles"])
def down_experts(
    gated,
    weights,
    scales,
    minimums,
    biases,
    topk_weights,
    out,
    choices,
    experts,
    num_choices,
    max_tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply by down, and by the weight of each choice: grid (max_tiles * blocks of HIDDEN,).

    Args:
        gated: [choices, INNER].
        weights: [experts, HIDDEN, WIDTH]; scales, minimums, biases: as for `gate_up_experts`.
        topk_weights: [choices].
        out: [choices, HIDDEN], written.
        choices, experts: see `lay_out_choices`.
    """
    tile, block, is_there = _place(experts, max_tiles, (HIDDEN + BLOCK_N - 1) // BLOCK_N)
    if not is_there:
        return
    expert = tl.load(experts + tile).to(tl.int64)
    of_rows = tl.load(choices + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    known = tl.minimum(of_rows, num_choices - 1)
    rows_of = gated + known.to(tl.int64) * INNER
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    weights += expert * HIDDEN * WIDTH
    scales += expert * HIDDEN * NUM_GROUPS
    of_columns = tl.minimum(columns, HIDDEN - 1)

    if FORMAT != "numbers" and FORMAT != "mxfp4":  # noqa: PLR1714, for Triton to read
        product = times_codes(
            rows_of,
            of_rows < num_choices,
            INNER,
            weights,
            scales,
            minimums + expert * HIDDEN * NUM_GROUPS,
            columns,
            columns < HIDDEN,
            HIDDEN,
            WIDTH,
            0,
            WIDTH // BLOCK_K,
            FORMAT,
            DOT_DTYPE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        total = tl.trans(product)
    else:
        total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        for start in range(0, INNER, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            is_k = (k < INNER) | (INNER % BLOCK_K == 0)
            rows = tl.load(rows_of[:, None] + k[None, :], mask=is_k[None, :], other=0.0)
            if FORMAT == "mxfp4":
                total = _add_mxfp4(total, rows, weights, scales, of_columns, start, INNER, BLOCK_K)
            else:
                at = weights + of_columns[None, :] * INNER + k[:, None]
                matrix = tl.load(at, mask=is_k[:, None], other=0.0).to(DOT_DTYPE)
                total = tl.dot(rows.to(DOT_DTYPE), matrix, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(biases + expert * HIDDEN + of_columns).to(tl.float32)[None, :]
    total *= tl.load(topk_weights + known).to(tl.float32)[:, None]
    tl.store(
        out + of_rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :],
        total.to(out.dtype.element_ty),
        mask=(of_rows < num_choices)[:, None] & (columns < HIDDEN)[None, :],
    )


@triton.jit(do_not_specialize=["num_numbers"])
def sum_choices(
    out,
    mixed,
    num_numbers,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum the choices of each token: grid (blocks of num_numbers,).

    Args:
        out: [tokens * TOP_K, HIDDEN].
        mixed: [tokens, HIDDEN], written; with HAS_BESIDE the sums are added to what is there.
        num_numbers: tokens * HIDDEN.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_there = n < num_numbers
    first = n // HIDDEN * (TOP_K * HIDDEN) + n % HIDDEN
    total = tl.full((BLOCK_N,), 0.0, tl.float32)
    if HAS_BESIDE:
        total += tl.load(mixed + n, mask=is_there, other=0.0).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        total += tl.load(out + first + choice * HIDDEN, mask=is_there, other=0.0).to(tl.float32)
    tl.store(mixed + n, total.to(mixed.dtype.element_ty), mask=is_there)


@triton.jit
def _place(experts, max_tiles, num_blocks):
    """Return this program's tile and block of columns, and whether there is such a tile."""
    program = tl.program_id(0)
    num_tiles = tl.load(experts + max_tiles)
    first = program // num_blocks // GROUP_TILES * GROUP_TILES
    num_grouped = tl.maximum(tl.minimum(num_tiles - first, GROUP_TILES), 1)
    in_group = program - first * num_blocks
    return first + in_group % num_grouped, in_group // num_grouped, program < num_tiles * num_blocks


@triton.jit
def _add_mxfp4(
    total,
    rows,
    codes,
    scales,
    of_columns,
    start,
    INPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add rows [M, K] by MXFP4 codes [outputs, INPUTS / 2] of some columns, from input `start`."""
    byte = start // 2 + tl.arange(0, BLOCK_K // 2)
    is_byte = (byte < INPUTS // 2) | (INPUTS % BLOCK_K == 0)
    matrix = tl.load(
        codes + of_columns[None, :] * (INPUTS // 2) + byte[:, None], mask=is_byte[:, None], other=0
    )
    group = start // SCALED + tl.arange(0, BLOCK_K // SCALED)
    is_group = (group < INPUTS // SCALED) | (INPUTS % BLOCK_K == 0)
    exponents = tl.load(
        scales + of_columns[:, None] * (INPUTS // SCALED) + group[None, :],
        mask=is_group[None, :],
        other=0,
    )
    return tl.dot_scaled(rows, None, "bf16", matrix, exponents, "e2m1", total)
