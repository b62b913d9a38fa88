"""Recurrent states over pages, as Triton programs: convolutions, state spaces and delta rules.

A batch is cut into pieces, each a few tokens of one row, and a state is left after a piece or not.
Rows that decode, rows with drafts and chunks differ in their pieces alone. A convolution takes all
pieces at once, as it reads inputs; a recurrence walks those of a row in turn, with a part of one
head's state that depends on no other part. It goes from token to token, or takes a piece as a
chunk: within it each token looks at those before it, as attention does, which is a few products of
matrices.

`pieces`, int32 [pieces, 5], those of a row in order: the row's first token in the batch; the
piece's first token and its end; the page of the state before the row's first token, 0 where that is
zero; and the page for the state after the piece, 0 for none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from session_server.attention.triton import pieces as layout

PIECE_COLUMNS = tl.constexpr(layout.PIECE_COLUMNS)

PRECISION = tl.constexpr("tf32")
"""Of products of matrices: finer than the halves that the inputs come from."""


@triton.jit
def _inputs(x, history, t, start, end, source, c, is_c, stride_x, CHANNELS, NUM_PAST):
    """Load inputs of positions `t` of the batch, float32 [positions, channels]; those before
    `start` are in page `source`, the last of them last, or zero."""
    oldest = tl.where(source != 0, start - NUM_PAST, start)
    own = tl.load(
        x + t.to(tl.int64)[:, None] * stride_x + c[None, :],
        mask=((t >= start) & (t < end))[:, None] & is_c[None, :],
        other=0.0,
    ).to(tl.float32)
    before = tl.load(
        history + (source * NUM_PAST + (t - start + NUM_PAST)[:, None]) * CHANNELS + c[None, :],
        mask=((t < start) & (t >= oldest))[:, None] & is_c[None, :],
        other=0.0,
    )
    return tl.where((t < start)[:, None], before, own)


# What differs from launch to launch is not compiled in: to compile takes a second, for everybody.
@triton.jit(do_not_specialize_on_alignment=["pieces"])
def convolve_pieces(
    x,
    taps,
    bias,
    history,
    out,
    pieces,
    stride_x,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Convolve some channels of a piece, and leave its last inputs: grid (pieces, channel blocks).

    Args:
        x: [tokens, CHANNELS].
        taps: [WIDTH, CHANNELS], that of the token itself last.
        bias: [CHANNELS], unless HAS_BIAS is false.
        history: of one layer, float32 [pages, WIDTH - 1, CHANNELS], oldest first.
        out: [tokens, CHANNELS].
    """
    NUM_PAST: tl.constexpr = WIDTH - 1
    piece = pieces + tl.program_id(0) * PIECE_COLUMNS
    start, begin, end = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    source, target = tl.load(piece + 3).to(tl.int64), tl.load(piece + 4).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_c = c < CHANNELS
    for first in range(begin, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        mixed = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for tap in tl.static_range(WIDTH):
            factors = tl.load(taps + tap * CHANNELS + c, mask=is_c, other=0.0).to(tl.float32)
            seen = _inputs(
                x, history, t - NUM_PAST + tap, start, end, source, c, is_c, stride_x,
                CHANNELS, NUM_PAST,
            )  # fmt: skip
            mixed += seen * factors[None, :]
        if HAS_BIAS:
            mixed += tl.load(bias + c, mask=is_c, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + t.to(tl.int64)[:, None] * CHANNELS + c[None, :],
            mixed.to(out.dtype.element_ty),
            mask=(t < end)[:, None] & is_c[None, :],
        )
    if target >= 0:
        w = tl.arange(0, BLOCK_W)
        last = _inputs(
            x, history, end - NUM_PAST + w, start, end, source, c, is_c, stride_x,
            CHANNELS, NUM_PAST,
        )  # fmt: skip
        tl.store(
            history + (target * NUM_PAST + w[:, None]) * CHANNELS + c[None, :],
            last,
            mask=(w < NUM_PAST)[:, None] & is_c[None, :],
        )


@triton.jit
def _tokens(x, t, is_t, stride, columns, is_column):
    """Load an input of some tokens, [tokens, columns]; what is masked is zero."""
    return tl.load(
        x + t.to(tl.int64)[:, None] * stride + columns[None, :],
        mask=is_t[:, None] & is_column[None, :],
        other=0.0,
    )


@triton.jit
def _decays(decay, t, is_t, stride, head):
    """Return what is kept of a state, by the decays of a chunk: from before it to each token, from
    each token to the end, to each token (rows) from each before it, and from before it to the end.
    """
    each = tl.load(decay + t.to(tl.int64) * stride + head, mask=is_t, other=0.0)
    since, total = tl.cumsum(each, 0), tl.sum(each, 0)
    is_seen = t[:, None] >= t[None, :]
    between = tl.exp(tl.where(is_seen, since[:, None] - since[None, :], float("-inf")))
    return tl.exp(since), tl.exp(total - since), between, tl.exp(total)


@triton.jit
def _begin(states, pieces, rows, head, r, c, NUM_HEADS, ROWS, COLUMNS):
    """Load what a row's head begins with: which are its pieces, where that part of the states lies
    in page 0, which of it there is, and the state."""
    row = rows + tl.program_id(0) * 2
    first, last = tl.load(row), tl.load(row + 1)
    source = tl.load(pieces + first * PIECE_COLUMNS + 3).to(tl.int64)
    places = states + (head * ROWS + r[:, None]) * COLUMNS + c[None, :]
    is_state = (r < ROWS)[:, None] & (c < COLUMNS)[None, :]
    is_read = is_state & (r < tl.where(source != 0, ROWS, 0))[:, None]
    state = tl.load(places + source * NUM_HEADS * ROWS * COLUMNS, mask=is_read, other=0.0)
    return first, last, places, is_state, state


@triton.jit(do_not_specialize_on_alignment=["pieces", "rows"])
def advance_state_space(
    x,
    decay,
    write,
    read,
    out,
    states,
    pieces,
    rows,
    stride_x,
    stride_decay,
    stride_write,
    stride_read,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Advance the state of a row's head: grid (rows, heads, blocks of ROWS).

    `state = exp(decay) * state + x (outer) write; out = state . read`. A chunk uses the duality of
    state spaces and attention (Mamba2; Dao and Gu 2024).

    Args:
        x: float32 [tokens, heads, ROWS].
        decay: float32 [tokens, heads].
        write, read: float32 [tokens, heads / GROUP, COLUMNS].
        out: float32 [tokens, heads, ROWS].
        states: of one layer, float32 [pages, heads, ROWS, COLUMNS].
        rows: int32 [rows, 2], the first of each row's pieces and their end.
        BLOCK_T: the most tokens of a piece, each of which is a chunk; 1 to go from token to token.
    """
    head = tl.program_id(1)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_C)
    is_r, is_c = r < ROWS, c < COLUMNS
    of_head, of_group = head * ROWS + r, head // GROUP * COLUMNS + c
    first, last, places, is_state, state = _begin(
        states, pieces, rows, head, r, c, NUM_HEADS, ROWS, COLUMNS
    )
    for index in range(first, last):
        piece = pieces + index * PIECE_COLUMNS
        begin, end = tl.load(piece + 1), tl.load(piece + 2)
        target = tl.load(piece + 4).to(tl.int64)
        if BLOCK_T == 1:
            for token in range(begin, end):
                t = tl.cast(token, tl.int64)
                values = tl.load(x + t * stride_x + of_head, mask=is_r, other=0.0)
                written = tl.load(write + t * stride_write + of_group, mask=is_c, other=0.0)
                asked = tl.load(read + t * stride_read + of_group, mask=is_c, other=0.0)
                state *= tl.exp(tl.load(decay + t * stride_decay + head))
                state += values[:, None] * written[None, :]
                said = tl.sum(state * asked[None, :], 1)
                tl.store(out + t * NUM_HEADS * ROWS + of_head, said, mask=is_r)
        else:
            t = begin + tl.arange(0, BLOCK_T)
            is_t = t < end
            kept, to_end, between, kept_by_all = _decays(decay, t, is_t, stride_decay, head)
            values = _tokens(x, t, is_t, stride_x, of_head, is_r)
            written = _tokens(write, t, is_t, stride_write, of_group, is_c)
            asked = _tokens(read, t, is_t, stride_read, of_group, is_c)
            scores = tl.dot(asked, tl.trans(written), input_precision=PRECISION) * between
            said = tl.dot(asked, tl.trans(state), input_precision=PRECISION) * kept[:, None]
            said = tl.dot(scores, values, said, input_precision=PRECISION)
            to = out + t.to(tl.int64)[:, None] * NUM_HEADS * ROWS + of_head[None, :]
            tl.store(to, said, mask=is_t[:, None] & is_r[None, :])
            left = tl.trans(values * to_end[:, None])
            state = tl.dot(left, written, state * kept_by_all, input_precision=PRECISION)
        if target >= 0:
            tl.store(places + target * NUM_HEADS * ROWS * COLUMNS, state, mask=is_state)


@triton.jit
def _inverse(lower, BLOCK_T: tl.constexpr):
    """Invert I + `lower`, which is strictly lower triangular, [BLOCK_T, BLOCK_T].

    Blocks on the diagonal of 2, 4, 8 ... rows are inverted in turn: where B is below two blocks A
    and C, the inverse has -C^-1 B A^-1.
    """
    i, j = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, BLOCK_T)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    size = 2
    while size < BLOCK_T:
        is_below = (i // size != j // size) & (i // (2 * size) == j // (2 * size))
        below = tl.where(is_below, lower, 0.0)
        product = tl.dot(inverse, below, input_precision=PRECISION)
        inverse -= tl.dot(product, inverse, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit(do_not_specialize_on_alignment=["pieces", "rows"])
def advance_delta_rule(
    q,
    k,
    v,
    decay,
    write,
    out,
    states,
    pieces,
    rows,
    stride_q,
    stride_k,
    stride_v,
    stride_decay,
    stride_write,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Advance the state of a row's head: grid (rows, heads, blocks of COLUMNS).

    `state = exp(decay) * state`, then `state += k (outer) write * (v - k . state)`, and `out = q .
    state` (gated delta rule; Yang, Kautz and Hatamizadeh 2025). In a chunk each correction depends
    on those before it, which is a triangular system (Yang et al. 2024).

    Args:
        q, k: float32 [tokens, heads / GROUP, ROWS].
        v: float32 [tokens, heads, COLUMNS].
        decay, write: float32 [tokens, heads].
        out: float32 [tokens, heads, COLUMNS].
        states: of one layer, float32 [pages, heads, ROWS, COLUMNS].
        rows: int32 [rows, 2], the first of each row's pieces and their end.
        BLOCK_T: the most tokens of a piece, each of which is a chunk; 1 to go from token to token.
    """
    head = tl.program_id(1)
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_r, is_c = r < ROWS, c < COLUMNS
    of_head, of_group = head * COLUMNS + c, head // GROUP * ROWS + r
    first, last, places, is_state, state = _begin(
        states, pieces, rows, head, r, c, NUM_HEADS, ROWS, COLUMNS
    )
    for index in range(first, last):
        piece = pieces + index * PIECE_COLUMNS
        begin, end = tl.load(piece + 1), tl.load(piece + 2)
        target = tl.load(piece + 4).to(tl.int64)
        if BLOCK_T == 1:
            for token in range(begin, end):
                t = tl.cast(token, tl.int64)
                asked = tl.load(q + t * stride_q + of_group, mask=is_r, other=0.0)
                keys = tl.load(k + t * stride_k + of_group, mask=is_r, other=0.0)
                values = tl.load(v + t * stride_v + of_head, mask=is_c, other=0.0)
                strength = tl.load(write + t * stride_write + head)
                state *= tl.exp(tl.load(decay + t * stride_decay + head))
                errors = values - tl.sum(keys[:, None] * state, 0)
                state += keys[:, None] * (errors * strength)[None, :]
                said = tl.sum(asked[:, None] * state, 0)
                tl.store(out + t * NUM_HEADS * COLUMNS + of_head, said, mask=is_c)
        else:
            t = begin + tl.arange(0, BLOCK_T)
            is_t = t < end
            kept, to_end, between, kept_by_all = _decays(decay, t, is_t, stride_decay, head)
            asked = _tokens(q, t, is_t, stride_q, of_group, is_r)
            keys = _tokens(k, t, is_t, stride_k, of_group, is_r)
            values = _tokens(v, t, is_t, stride_v, of_head, is_c)
            at = write + t.to(tl.int64) * stride_write + head
            strength = tl.load(at, mask=is_t, other=0.0)[:, None]
            known = tl.dot(keys, state, input_precision=PRECISION) * kept[:, None]
            overlaps = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * between
            overlaps = tl.where(t[:, None] > t[None, :], overlaps * strength, 0.0)
            inverse = _inverse(overlaps, BLOCK_T)
            errors = (values - known) * strength
            corrections = tl.dot(inverse, errors, input_precision=PRECISION)
            scores = tl.dot(asked, tl.trans(keys), input_precision=PRECISION) * between
            said = tl.dot(asked, state, input_precision=PRECISION) * kept[:, None]
            said = tl.dot(scores, corrections, said, input_precision=PRECISION)
            to = out + t.to(tl.int64)[:, None] * NUM_HEADS * COLUMNS + of_head[None, :]
            tl.store(to, said, mask=is_t[:, None] & is_c[None, :])
            keys = _tokens(k, t, is_t, stride_k, of_group, is_r)  # anew: registers are few
            left = tl.trans(keys * to_end[:, None])
            state = tl.dot(left, corrections, state * kept_by_all, input_precision=PRECISION)
        if target >= 0:
            tl.store(places + target * NUM_HEADS * ROWS * COLUMNS, state, mask=is_state)
