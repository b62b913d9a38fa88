"""Norms, rotation, gates and the choice of tokens, as Triton programs.

They compute in float32 and round once, where they store. What a program takes is a block of rows,
so that small rows fill it too. What differs from launch to launch is not compiled in.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

ALL = tl.constexpr(tl.PropagateNan.ALL)
"""A NaN must not become a bound: it tells that a row is lost."""


@triton.jit
def _normed(x, weight, eps, SIZE: tl.constexpr):
    """Root mean square norm of the rows of `x`, float32; what is behind SIZE is 0."""
    factors = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    return x * factors[:, None] * weight


@triton.jit
def _turned(x, cos, sin, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rotate the adjacent pairs of the rows of `x` [ROWS, COLUMNS], one angle a pair."""
    even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (ROWS, COLUMNS))


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x,
    weight,
    out,
    num_rows,
    stride_x,
    stride_x_group,
    stride_out,
    stride_out_group,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WEIGHT_BY_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Normalize rows, each of GROUPS that are normed by themselves: grid (blocks of groups).

    Args:
        x, out: [num_rows, GROUPS, SIZE]; may be the same.
        weight: [SIZE], or [GROUPS, SIZE] with WEIGHT_BY_GROUP.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, group = (rows // GROUPS).to(tl.int64), rows % GROUPS
    n = tl.arange(0, BLOCK_N)[None, :]
    is_in = (row < num_rows)[:, None] & (n < SIZE)
    at = x + (row * stride_x + group * stride_x_group)[:, None] + n
    each = tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    of_groups = weight + n
    if WEIGHT_BY_GROUP:
        of_groups += group[:, None] * SIZE
    weights = tl.load(of_groups, mask=is_in, other=0.0).to(tl.float32)
    to = out + (row * stride_out + group * stride_out_group)[:, None] + n
    tl.store(to, _normed(each, weights, eps, SIZE).to(out.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["num_rows"])
def add_and_norm_rows(
    hidden,
    y,
    after,
    before,
    out,
    num_rows,
    stride_y,
    factor,
    eps_after,
    eps_before,
    SIZE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add `factor * norm(y)` to the hidden states, and normalize these: grid (blocks of rows).

    Args:
        hidden: [num_rows, SIZE], contiguous; changed.
        y: [num_rows, SIZE].
        after: [SIZE], weight of the norm of `y`, unless HAS_AFTER is false.
        before: [SIZE], weight of the norm of what `hidden` becomes, unless HAS_BEFORE is false.
        out: as `hidden`: where that goes.
    """
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    is_in = (rows < num_rows) & (n < SIZE)
    added = tl.load(y + rows * stride_y + n, mask=is_in, other=0.0).to(tl.float32)
    if HAS_AFTER:
        weights = tl.load(after + n, mask=n < SIZE, other=0.0).to(tl.float32)
        added = _normed(added, weights, eps_after, SIZE)
    at = rows * SIZE + n
    before_it = tl.load(hidden + at, mask=is_in, other=0.0).to(tl.float32)
    kept = (before_it + added * factor).to(hidden.dtype.element_ty)
    tl.store(hidden + at, kept, mask=is_in)
    if HAS_BEFORE:
        weights = tl.load(before + n, mask=n < SIZE, other=0.0).to(tl.float32)
        normed = _normed(kept.to(tl.float32), weights, eps_before, SIZE)
        tl.store(out + at, normed.to(out.dtype.element_ty), mask=is_in)


# A pool's slots are a row of a matrix: where it begins depends on the number of tokens.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def norm_rotate_store(
    qkv,
    weight,
    phases,
    slots,
    keys,
    values,
    num_tokens,
    stride_qkv,
    stride_kv_head,
    stride_kv_slot,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Normalize and rotate Q and K, and store K and V in pages: grid (blocks of heads).

    Args:
        qkv: [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS or more, HEAD_DIM], pairs adjacent. Q is
            changed, K and V are not.
        weight: [NUM_HEADS + NUM_KV_HEADS, HEAD_DIM], unless HAS_NORM is false.
        phases: float32 [num_tokens, ROTARY_DIM / 2, 2], cosines and sines.
        slots: int64 [num_tokens].
        keys, values: of one layer, [NUM_KV_HEADS, slots, HEAD_DIM].
        ROTARY_DIM: leading elements that are rotated; 0 for none.
        LARGEST: bound of what is stored; 0 for none.
    """
    of_token: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = (rows // of_token).to(tl.int64), rows % of_token
    is_row = token < num_tokens
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    d = tl.arange(0, BLOCK_D)[None, :]
    is_in = is_row[:, None] & (d < HEAD_DIM)
    at = qkv + (token * stride_qkv + head * HEAD_DIM)[:, None] + d
    x = tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    if HAS_NORM:
        is_normed = is_in & (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
        of_head = weight + head[:, None] * HEAD_DIM + d
        weights = tl.load(of_head, mask=is_normed, other=0.0).to(tl.float32)
        x = tl.where(is_value[:, None], x, _normed(x, weights, eps, HEAD_DIM))
    if ROTARY_DIM > 0:
        pair = tl.arange(0, BLOCK_D // 2)[None, :]
        is_pair = (is_row & (head < NUM_HEADS + NUM_KV_HEADS))[:, None] & (pair < ROTARY_DIM // 2)
        angle = phases + (token * ROTARY_DIM)[:, None] + 2 * pair
        cos = tl.load(angle, mask=is_pair, other=1.0)
        sin = tl.load(angle + 1, mask=is_pair, other=0.0)
        x = _turned(x, cos, sin, BLOCK_M, BLOCK_D)
    tl.store(at, x.to(qkv.dtype.element_ty), mask=is_in & (head < NUM_HEADS)[:, None])
    if LARGEST > 0:
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=ALL)
    stored = x.to(keys.dtype.element_ty)
    slot = tl.load(slots + token, mask=is_row, other=0)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    to = (kv_head.to(tl.int64) * stride_kv_head + slot * stride_kv_slot)[:, None] + d
    tl.store(keys + to, stored, mask=is_in & is_key[:, None])
    tl.store(values + to, stored, mask=is_in & is_value[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_latent(
    q,
    keys,
    phases,
    num_tokens,
    stride_q,
    stride_q_head,
    stride_key,
    NUM_HEADS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate the heads of Q and the one key that they share, in place: grid (blocks of heads).

    Args:
        q: [num_tokens, NUM_HEADS, ROTARY_DIM], pairs adjacent.
        keys: [num_tokens, ROTARY_DIM].
        phases: float32 [num_tokens, ROTARY_DIM / 2, 2], cosines and sines.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = (rows // (NUM_HEADS + 1)).to(tl.int64), rows % (NUM_HEADS + 1)
    is_row = token < num_tokens
    d = tl.arange(0, BLOCK_D)[None, :]
    is_in = is_row[:, None] & (d < ROTARY_DIM)
    is_q, is_key = is_in & (head < NUM_HEADS)[:, None], is_in & (head == NUM_HEADS)[:, None]
    of_q = q + (token * stride_q + head * stride_q_head)[:, None] + d
    of_keys = keys + (token * stride_key)[:, None] + d
    # Each element is in one of them; what is masked is 0.
    x = tl.load(of_q, mask=is_q, other=0.0).to(tl.float32)
    x += tl.load(of_keys, mask=is_key, other=0.0).to(tl.float32)
    pair = tl.arange(0, BLOCK_D // 2)[None, :]
    is_pair = is_row[:, None] & (pair < ROTARY_DIM // 2)
    angle = phases + (token * ROTARY_DIM)[:, None] + 2 * pair
    cos = tl.load(angle, mask=is_pair, other=1.0)
    sin = tl.load(angle + 1, mask=is_pair, other=0.0)
    turned = _turned(x, cos, sin, BLOCK_M, BLOCK_D).to(q.dtype.element_ty)
    tl.store(of_q, turned, mask=is_q)
    tl.store(of_keys, turned, mask=is_key)


@triton.jit(do_not_specialize=["num_rows"])
def gate_rows(
    gate,
    up,
    out,
    num_rows,
    stride_gate,
    stride_up,
    alpha,
    limit,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Combine a gate with what it lets through: grid (blocks of rows, blocks of columns).

    Args:
        gate, up: [num_rows, SIZE].
        out: [num_rows, SIZE], contiguous.
        alpha, limit: of the kind "clamped".
    """
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    is_in = (rows < num_rows) & (n < SIZE)
    x = tl.load(gate + rows * stride_gate + n, mask=is_in, other=0.0).to(tl.float32)
    y = tl.load(up + rows * stride_up + n, mask=is_in, other=0.0).to(tl.float32)
    if KIND == "silu":
        x *= tl.sigmoid(x)
    elif KIND == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "clamped":
        x = tl.minimum(x, limit, propagate_nan=ALL)
        x *= tl.sigmoid(alpha * x)
        y = tl.clamp(y, -limit, limit, propagate_nan=ALL) + 1.0
    else:
        tl.static_assert(KIND == "sigmoid")
        x = tl.sigmoid(x)
    tl.store(out + rows * SIZE + n, (x * y).to(out.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["num_rows"])
def best_of_blocks(
    logits,
    tops,
    ids,
    finite,
    num_rows,
    stride_logits,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Find the largest logit of each block of the vocabulary: grid (blocks of rows, NUM_BLOCKS).

    Args:
        logits: float32 [num_rows, VOCAB].
        tops: float32 [num_rows, NUM_BLOCKS], written: the largest; `ids`: int32, the lowest id that
            has it.
        finite: int32 [num_rows, NUM_BLOCKS], written: whether all of the block is.
    """
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    is_row = rows < num_rows
    is_in = is_row[:, None] & (n < VOCAB)
    at = logits + (rows * stride_logits)[:, None] + n
    each = tl.load(at, mask=is_in, other=float("-inf"))
    top = tl.max(each, 1)
    to = rows * NUM_BLOCKS + tl.program_id(1)
    tl.store(tops + to, top, mask=is_row)
    tl.store(ids + to, tl.min(tl.where(each == top[:, None], n, VOCAB), 1), mask=is_row)
    # A comparison with NaN is false.
    is_lost = is_in & ~(tl.abs(each) < float("inf"))
    tl.store(finite + to, 1 - tl.max(is_lost.to(tl.int32), 1), mask=is_row)


@triton.jit
def _noise(keys, token_ids, IS_INTERPRETED: tl.constexpr):
    """The logarithm of `TokenNoise.exponentials`, operation by operation: [rows, tokens] of int64
    keys [rows, 1] and int32 [1, tokens]."""
    bits = keys.to(tl.uint64) + (token_ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    minus = ((bits >> 11) + 1).to(tl.int64).to(tl.float32) * -1.1102230246251565e-16
    if not IS_INTERPRETED:
        return libdevice.log(-libdevice.log1p(minus))
    # The interpreter has no library of functions. Kahan's log1p: what 1 + x loses by rounding, the
    # logarithm must lose too.
    one = 1.0 + minus
    is_one, is_zero = one == 1.0, one == 0.0
    slope = tl.log(tl.where(is_zero, 0.5, one)) / tl.where(is_one, 1.0, one - 1.0)
    return tl.log(tl.where(is_zero, float("inf"), -minus * tl.where(is_one, 1.0, slope)))


@triton.jit(do_not_specialize=["num_rows"])
def draw_of_blocks(
    logits,
    tops,
    keys,
    temperatures,
    scores,
    ids,
    num_rows,
    stride_logits,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Find the best of each block of the vocabulary by Gumbel-max: grid as of `best_of_blocks`.

    Args:
        logits: float32 [num_rows, VOCAB].
        tops: float32 [num_rows, NUM_BLOCKS], from `best_of_blocks`.
        keys: int64 [num_rows].
        temperatures: float32 [num_rows]; where it is 0, the score of a token is its logit.
        scores: float32 [num_rows, NUM_BLOCKS], written: the largest; `ids`: int32, the lowest id
            that has it.
        BLOCKS: a power of two, not less than NUM_BLOCKS.
    """
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    b = tl.arange(0, BLOCKS)[None, :]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    is_row = rows < num_rows
    is_in = is_row[:, None] & (n < VOCAB)
    of_blocks = tops + (rows * NUM_BLOCKS)[:, None] + b
    is_block = is_row[:, None] & (b < NUM_BLOCKS)
    top = tl.max(tl.load(of_blocks, mask=is_block, other=float("-inf")), 1)
    top = tl.where(is_row, top, 0.0)[:, None]
    temperature = tl.load(temperatures + rows, mask=is_row, other=0.0)[:, None]
    key = tl.load(keys + rows, mask=is_row, other=0)[:, None]
    at = logits + (rows * stride_logits)[:, None] + n
    each = tl.load(at, mask=is_in, other=float("-inf"))
    is_greedy = temperature == 0.0
    scaled = tl.div_rn(each - top, tl.where(is_greedy, 1.0, temperature))
    each = tl.where(is_greedy, each, scaled - _noise(key, n, IS_INTERPRETED))
    score = tl.max(each, 1)
    to = rows * NUM_BLOCKS + tl.program_id(1)
    tl.store(scores + to, score, mask=is_row)
    tl.store(ids + to, tl.min(tl.where(each == score[:, None], n, VOCAB), 1), mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def best_of_rows(
    scores,
    ids,
    finite,
    tokens,
    is_finite,
    num_rows,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Choose among what blocks of the vocabulary have: grid (blocks of rows).

    Args:
        scores, ids, finite: [num_rows, NUM_BLOCKS], of `best_of_blocks`, or `draw_of_blocks`.
        tokens: int64 [num_rows], written: the best, the lowest id among equals; of a row that is
            not finite any.
        is_finite: bool [num_rows], written.
        BLOCKS: a power of two, not less than NUM_BLOCKS.
    """
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    b = tl.arange(0, BLOCKS)[None, :]
    is_row = rows < num_rows
    is_block = is_row[:, None] & (b < NUM_BLOCKS)
    at = (rows * NUM_BLOCKS)[:, None] + b
    each = tl.load(scores + at, mask=is_block, other=float("-inf"))
    of_blocks = tl.load(ids + at, mask=is_block, other=VOCAB)
    token = tl.min(tl.where(each == tl.max(each, 1)[:, None], of_blocks, VOCAB), 1)
    tl.store(tokens + rows, tl.minimum(token, VOCAB - 1).to(tl.int64), mask=is_row)
    are_finite = tl.load(finite + at, mask=is_block, other=1)
    tl.store(is_finite + rows, tl.min(are_finite, 1) != 0, mask=is_row)
