"""Attention over pages, as Triton programs: one kernel for decode, chunks and guesses.

A program works on a tile: some rows of queries. The query heads that share a KV head are folded
into the tokens of a row of the batch: token t and head g of its group of G are query row t * G + g.
So a lone token fills as much of a matrix product as its group allows, and a chunk all of it. The
softmax is the online one (Milakov and Gimelshein 2018), in powers of two, as in FlashAttention-2
(Dao 2023). Where there are too few tiles to fill a device, the history is split among programs
whose results a second kernel merges (Flash-Decoding; Dao et al. 2023).

A tile reads the page table itself, position by position: pages of any size, in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from session_server.attention.triton import tiles as tiling

LOG2_E = tl.constexpr(1.4426950408889634)

MIN_SPLIT_LEN = tl.constexpr(tiling.MIN_SPLIT_LEN)
"""A multiple of every BLOCK_N."""


# What differs from launch to launch is not compiled in: to compile takes a second, for everybody.
@triton.jit(
    do_not_specialize=["first_token", "num_tokens", "num_splits"],
    do_not_specialize_on_alignment=["tiles"],
)
def attend_tiles(
    q,
    kv_keys,
    kv_values,
    out,
    lse,
    sinks,
    table,
    tiles,
    first_token,
    num_tokens,
    num_splits,
    stride_q_token,
    stride_q_head,
    stride_kv_head,
    stride_kv_slot,
    stride_table_row,
    scale,
    softcap,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attend from one tile to one split of its history, for one KV head: grid (tiles, kv_heads,
    splits).

    Args:
        q: [tokens, heads, HEAD_DIM + ROPE_DIM].
        kv_keys, kv_values: of one layer, [kv_heads, slots, HEAD_DIM + ROPE_DIM].
        out: [tokens, heads, HEAD_DIM]; with splits float32 [splits, tokens, heads, HEAD_DIM], not
            written by programs whose split of the history is empty.
        lse: float32 [splits, tokens, heads], log2 of the sum of each split's weights; unused
            without splits.
        sinks: [heads], unless HAS_SINKS is false. With splits the merge adds them.
        table: int32 [rows, pages].
        tiles: int32 [tiles, 5]: table row, position of the row's first new token, number of new
            tokens, their offset in the batch, and the first of this tile's query rows.
        first_token, num_tokens: with splits the tokens of this launch, because `out` has those
            alone; without 0 and whatever.
        num_splits: splits of each history.
        WINDOW: positions that a token sees, its own included; 0 for all.
        DOT_DTYPE: in which products are computed; they are summed up in float32.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tiles + tile * 5).to(tl.int64)
    start = tl.load(tiles + tile * 5 + 1)
    num_new = tl.load(tiles + tile * 5 + 2)
    offset = tl.load(tiles + tile * 5 + 3).to(tl.int64)
    first_row = tl.load(tiles + tile * 5 + 4)

    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = tokens < num_new
    positions = start + tokens

    d = tl.arange(0, BLOCK_D)
    is_d = d < HEAD_DIM
    q_rows = q + (offset + tokens) * stride_q_token + heads * stride_q_head
    queries = tl.load(q_rows[:, None] + d[None, :], mask=is_row[:, None] & is_d[None, :], other=0.0)
    queries = queries.to(DOT_DTYPE)
    if ROPE_DIM > 0:
        r = tl.arange(0, BLOCK_R)
        is_r = r < ROPE_DIM
        rotary = tl.load(
            q_rows[:, None] + HEAD_DIM + r[None, :], mask=is_row[:, None] & is_r[None, :], other=0.0
        ).to(DOT_DTYPE)

    # The tile's keys: from the first that its first token sees, to its last token's own.
    last = tl.minimum((first_row + BLOCK_M - 1) // GROUP, num_new - 1)
    end = tl.where(
        first_row < num_new * GROUP, start + last + 1, 0
    )  # in graphs a tile may be empty
    first = 0
    if WINDOW > 0:
        first = tl.maximum(start + first_row // GROUP - WINDOW + 1, 0)
    begin = first // BLOCK_N * BLOCK_N
    if IS_SPLIT:
        num_blocks = tl.cdiv(end - begin, BLOCK_N)
        of_split = tl.maximum(tl.cdiv(num_blocks, num_splits) * BLOCK_N, MIN_SPLIT_LEN)
        begin += split * of_split
        end = tl.minimum(end, begin + of_split)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    page_of = table + row * stride_table_row
    keys_of = kv_keys + kv_head.to(tl.int64) * stride_kv_head
    values_of = kv_values + kv_head.to(tl.int64) * stride_kv_head
    for block in range(begin, end, BLOCK_N):
        n = block + tl.arange(0, BLOCK_N)
        is_key = (n >= first) & (n < end)
        page = tl.load(page_of + n // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        slots = (page * PAGE_SIZE + n % PAGE_SIZE) * stride_kv_slot
        keys = tl.load(
            keys_of + slots[None, :] + d[:, None], mask=is_d[:, None] & is_key[None, :], other=0.0
        ).to(DOT_DTYPE)
        scores = tl.dot(queries, keys, input_precision="ieee")
        if ROPE_DIM > 0:
            turned = tl.load(
                keys_of + slots[None, :] + HEAD_DIM + r[:, None],
                mask=is_r[:, None] & is_key[None, :],
                other=0.0,
            ).to(DOT_DTYPE)
            scores += tl.dot(rotary, turned, input_precision="ieee")
        scores *= scale
        if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores *= LOG2_E
        seen = is_key[None, :] & (n[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen &= n[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has no score to subtract: -inf - -inf is NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        shrunk = tl.exp2(top - shift)
        total = total * shrunk + tl.sum(weights, 1)
        if VALUES_ARE_KEYS:
            values = tl.trans(keys)
        else:
            values = tl.load(
                values_of + slots[:, None] + d[None, :],
                mask=is_key[:, None] & is_d[None, :],
                other=0.0,
            ).to(DOT_DTYPE)
        mixed = mixed * shrunk[:, None]
        mixed = tl.dot(weights.to(DOT_DTYPE), values, mixed, input_precision="ieee")
        top = higher

    shift = tl.where(top == float("-inf"), 0.0, top)
    if HAS_SINKS and not IS_SPLIT:
        of_heads = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += tl.exp2(of_heads - shift)
    divisor = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / divisor[:, None]
    at = (split.to(tl.int64) * num_tokens + offset - first_token + tokens) * NUM_HEADS + heads
    if IS_SPLIT:
        seen_of_split = tl.where(total == 0.0, float("-inf"), tl.log2(divisor) + shift)
        tl.store(lse + at, seen_of_split, mask=is_row)
        # Graphs are split for the longest history there may be: of a short one most see nothing.
        # To return early would spare more, but spills registers in fp32, as does a mask by row.
        is_row = tokens < tl.where(begin < end, num_new, 0)
    tl.store(
        out + at[:, None] * HEAD_DIM + d[None, :],
        mixed.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_d[None, :],
    )


@triton.jit(do_not_specialize=["num_tokens"])
def merge_splits(
    parts,
    lse,
    out,
    sinks,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge what the splits of one token and head have computed: grid (tokens, heads).

    Args:
        parts: float32 [splits, tokens, heads, HEAD_DIM], each divided by its own total; what was
            not written may be NaN, and is not read.
        lse: float32 [splits, tokens, heads], log2 of these totals; -inf where a split saw nothing.
        out: [tokens, heads, HEAD_DIM].
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_D)
    is_d = d < HEAD_DIM
    at = (s.to(tl.int64) * num_tokens + token) * NUM_HEADS + head
    totals = tl.load(lse + at)
    top = tl.max(totals, 0)
    weights = tl.exp2(totals - top)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - top)
    is_there = is_d[None, :] & (totals > float("-inf"))[:, None]
    each = tl.load(parts + at[:, None] * HEAD_DIM + d[None, :], mask=is_there, other=0.0)
    mixed = tl.sum(each * weights[:, None], 0) / total
    tl.store(
        out + (token * NUM_HEADS + head) * HEAD_DIM + d,
        mixed.to(out.dtype.element_ty),
        mask=is_d,
    )
