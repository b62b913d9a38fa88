"""Attention on the CPU: in place over extents, GQA group folded into the queries.

Attention over a set of keys can be split and merged by log-sum-exp (Milakov and Gimelshein 2018;
the rule of split-KV decoding), and a token sees *all* of its history, in any order. So the history
of a row is cut into pieces that are cheap to read: long runs of consecutive pages are views of the
pool, and whatever is scattered is gathered into one piece. A chunk of new tokens adds one causal
piece, read from the projection itself, and needs no mask.

The few tokens of a row that verifies guesses are folded too: one pass over the keys serves all of
them. What they may not see of each other is masked, in the one piece of their row or, where it has
several, in a piece of their own.

Rows of as many tokens with short histories are one padded call: there the overhead of a call costs
more than copying a few pages.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cache.pool.mha import MhaPool
from cache.pool.page_table import PageRun, PageTable
from cache.types import pages_for
from session_server.attention.base import AttentionMeta, AttentionPlan, Span

MIN_VIEW_BYTES: Final = 1 << 18
"""A run whose K and V are larger is read in place, a smaller one copied (8 GB/s) together with
other small ones: one more piece costs about 30 us."""

MAX_PADDED_BYTES: Final = 1 << 17
"""A row whose K and V are smaller joins the padded batch instead of a call of its own (14 us)."""

MIN_PADDED_ROWS: Final = 2


MAX_FOLDED_TOKENS: Final = 17
"""A span of at most so many tokens folds them into the GQA group (five tokens then cost 1.2-1.6
times what one costs, and 3-4 times unfolded); a longer one fills the kernel by itself."""


class CpuBackend:
    """fp32 on the CPU, through torch's flash kernel."""

    def __init__(self, pool: MhaPool, table: PageTable, *, num_heads: int) -> None:
        """Args:
        pool: the K and V; on the CPU.
        table: which pages are whose.
        num_heads: query heads.
        """
        assert num_heads % pool.num_kv_heads == 0, "query heads divide over kv heads"
        assert pool.device.type == "cpu", "views of the pool are read in place"
        self._pool = pool
        self._table = table
        self._group = num_heads // pool.num_kv_heads
        page_bytes = pool.bytes_per_layer_token * pool.page_size
        self._min_view_pages = max(1, MIN_VIEW_BYTES // page_bytes)
        self._max_padded_len = MAX_PADDED_BYTES // pool.bytes_per_layer_token

    def plan(self, meta: AttentionMeta) -> AttentionPlan:
        """Sort the spans into padded batches and rows on their own."""
        parts: list[_PaddedRows | _RowPieces] = []
        for num_tokens, group in itertools.groupby(meta.spans, lambda span: span.num_tokens):
            spans = tuple(group)
            num_padded = self._num_padded(spans) if num_tokens <= MAX_FOLDED_TOKENS else 0
            if num_padded:
                parts.append(self._padded(spans[:num_padded]))
            parts += [self._row(span) for span in spans[num_padded:]]
        return _CpuPlan(self._pool, meta.slots, parts)

    def _num_padded(self, spans: tuple[Span, ...]) -> int:
        """How many of these spans, the shortest context first, are worth one padded call."""
        is_short = [span.end <= self._max_padded_len for span in spans]
        return sum(is_short) if sum(is_short) >= MIN_PADDED_ROWS else 0

    def _padded(self, spans: tuple[Span, ...]) -> _PaddedRows:
        page_size = self._pool.page_size
        num_pages = pages_for(spans[-1].end, page_size)
        pages = np.stack([self._table.pages(span.row, num_pages) for span in spans])
        # Entries beyond a row's own length may name other rows' pages, and cells beyond it hold
        # what an earlier holder left. The mask hides them, but zero times NaN is NaN: the copies
        # of what is hidden from the whole row are cleared too.
        slots = np.arange(num_pages * page_size)
        seen = np.array([[span.start] for span in spans]) + np.arange(spans[0].num_tokens)
        hidden = slots > seen[:, :, None]
        bias = np.where(hidden, np.float32("-inf"), np.float32(0))
        if spans[0].num_tokens > 1:
            bias = bias.repeat(self._group, axis=1)
        return _PaddedRows(
            spans=spans,
            pages=torch.from_numpy(pages.astype(np.int64).reshape(-1)),
            hidden=torch.from_numpy(np.flatnonzero(hidden[:, -1])),
            bias=torch.from_numpy(bias[:, None]),
        )

    def _row(self, span: Span) -> _RowPieces:
        if span.num_tokens <= MAX_FOLDED_TOKENS:
            # The pool holds the new tokens by now: they are part of what they see.
            views, pages, num_gathered = self._pieces(span.row, span.end)
            if span.num_tokens == 1:
                return _RowPieces(span, views, pages, num_gathered, sees_itself=True, bias=None)
            if len(views) + (pages is not None) == 1:
                bias = self._causal(span.num_tokens, span.end)
                return _RowPieces(span, views, pages, num_gathered, sees_itself=True, bias=bias)
            bias = self._causal(span.num_tokens, span.num_tokens)
        else:
            bias = None
        # The tokens of a chunk see each other causally, from the projection.
        views, pages, num_gathered = self._pieces(span.row, span.start)
        return _RowPieces(span, views, pages, num_gathered, sees_itself=False, bias=bias)

    def _causal(self, num_tokens: int, num_keys: int) -> Tensor:
        """What folded tokens may not see of the last `num_tokens` keys."""
        bias = torch.zeros(num_tokens, self._group, num_keys)
        unseen = torch.full((num_tokens, num_tokens), -torch.inf).triu_(1)
        bias[:, :, num_keys - num_tokens :] = unseen.unsqueeze(1)
        return bias.view(1, 1, -1, num_keys)

    def _pieces(self, row: int, length: int) -> tuple[list[tuple[Tensor, ...]], Tensor | None, int]:
        """The first `length` positions: runs in place (views of every layer), then the pages to
        gather, int64 [n], and how many of their slots count."""
        page_size = self._pool.page_size
        views: list[tuple[Tensor, ...]] = []
        scattered: list[PageRun] = []
        num_pages = pages_for(length, page_size)
        runs = self._table.runs(row, num_pages) if length else ()
        # The page that is only partly filled has to end its piece.
        unused = num_pages * page_size - length
        for index, (first, count) in enumerate(runs):
            is_last = index == len(runs) - 1
            if len(runs) == 1 or count >= self._min_view_pages:
                num_slots = count * page_size - (unused if is_last else 0)
                views.append(self._pool.run(first * page_size, num_slots))
            else:
                scattered.append((first, count))
        if not scattered:
            return views, None, 0
        pages = np.concatenate([np.arange(first, first + count) for first, count in scattered])
        ends_scattered = runs[-1] == scattered[-1]
        num_slots = len(pages) * page_size - (unused if ends_scattered else 0)
        return views, torch.from_numpy(pages), num_slots


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """Rows of as many tokens each. `pages`: int64 [rows * pages of the longest]. `hidden`: int64
    [n], indices into [rows * slots] where no token of a row looks. `bias`: float32
    [rows, 1, tokens of a row, slots], a token repeated for its GQA group where there are several,
    0 where it may look."""

    spans: tuple[Span, ...]
    pages: Tensor
    hidden: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class _RowPieces:
    """One span and its history: runs in place (views of every layer), the rest to gather.

    `sees_itself`: the new tokens are the last keys of the pieces, instead of one more piece.
    `bias`: float32, what folded tokens may not see of these keys, or of that piece.
    """

    span: Span
    views: list[tuple[Tensor, ...]]
    gathered_pages: Tensor | None
    num_gathered: int
    sees_itself: bool
    bias: Tensor | None


class _CpuPlan:
    """See `AttentionPlan`."""

    __slots__ = ("_parts", "_pool", "_slots")

    def __init__(self, pool: MhaPool, slots: Tensor, parts: list[_PaddedRows | _RowPieces]) -> None:
        self._pool = pool
        self._slots = slots
        self._parts = parts

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `AttentionPlan.attend`."""
        self._pool.write(layer, self._slots, kv)
        mixed = []
        for part in self._parts:
            if isinstance(part, _PaddedRows):
                mixed.append(self._attend_padded(layer, q, part))
                continue
            own = slice(part.span.offset, part.span.offset + part.span.num_tokens)
            if part.span.num_tokens > MAX_FOLDED_TOKENS:
                mixed.append(self._attend_chunk(layer, q[own], kv[own], part))
            else:
                mixed.append(self._attend_folded(layer, q[own], kv[own], part))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend_padded(self, layer: int, q: Tensor, padded: _PaddedRows) -> Tensor:
        spans, kv_heads = padded.spans, self._pool.num_kv_heads
        own = q[spans[0].offset : spans[-1].offset + spans[-1].num_tokens]
        gathered = self._pool.gather(layer, padded.pages).index_fill_(2, padded.hidden, 0.0)
        k, v = gathered.view(2, kv_heads, len(spans), -1, q.shape[-1]).transpose(1, 2)
        folded = _fold(own, len(spans), kv_heads)
        out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=padded.bias)
        return _unfold(out, own)

    def _attend_folded(self, layer: int, q: Tensor, kv: Tensor, row: _RowPieces) -> Tensor:
        folded = _fold(q, 1, self._pool.num_kv_heads)
        pieces = self._history(layer, row)
        if len(pieces) == 1 and row.sees_itself:
            k, v = pieces[0]
            out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=row.bias)
            return _unfold(out, q)
        parts = [_flash(folded, k, v) for k, v in pieces]
        if not row.sees_itself:
            k, v = kv.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
            parts.append(_flash(folded, k, v, bias=row.bias))
        return _unfold(_merge(parts), q)

    def _attend_chunk(self, layer: int, q: Tensor, kv: Tensor, row: _RowPieces) -> Tensor:
        heads = q.transpose(0, 1).unsqueeze(0)
        k, v = kv.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
        pieces = self._history(layer, row)
        if pieces:
            parts = [_flash(heads, *piece) for piece in pieces]
            parts.append(_flash(heads, k, v, is_causal=True))
            out = _merge(parts)
        else:
            out = functional.scaled_dot_product_attention(
                heads, k, v, is_causal=True, enable_gqa=True
            )
        return out[0].transpose(0, 1).flatten(1)

    def _history(self, layer: int, row: _RowPieces) -> list[tuple[Tensor, Tensor]]:
        """K and V of every piece, each [1, kv_heads, length, head_dim]."""
        pieces = [(views[2 * layer], views[2 * layer + 1]) for views in row.views]
        if row.gathered_pages is not None:
            copied = self._pool.gather(layer, row.gathered_pages)
            k, v = copied[:, None, :, : row.num_gathered]
            pieces.append((k, v))
        return pieces


def _fold(q: Tensor, num_rows: int, kv_heads: int) -> Tensor:
    """[rows * tokens, heads, head_dim] -> [rows, kv_heads, tokens * group, head_dim]."""
    num_tokens, head_dim = len(q) // num_rows, q.shape[-1]
    if num_tokens == 1:
        return q.reshape(num_rows, kv_heads, -1, head_dim)
    by_head = q.reshape(num_rows, num_tokens, kv_heads, -1, head_dim).transpose(1, 2)
    return by_head.reshape(num_rows, kv_heads, -1, head_dim)


def _unfold(out: Tensor, q: Tensor) -> Tensor:
    """What `_fold` made of `q`, after attention: [rows * tokens, heads * head_dim]."""
    num_rows, kv_heads = out.shape[:2]
    if len(q) == num_rows:
        return out.reshape(num_rows, -1)
    by_token = out.view(num_rows, kv_heads, len(q) // num_rows, -1, q.shape[-1]).transpose(1, 2)
    return by_token.reshape(len(q), -1)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; q heads may be a multiple of kv heads.

    Returns:
        ([1, heads, queries, head_dim], [1, heads, queries]).
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, is_causal, attn_mask=bias
    )
    return out, lse


def _merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Combine attention over disjoint sets of keys into attention over their union."""
    out, lse = parts[0]
    for other, other_lse in parts[1:]:
        share = torch.sigmoid(other_lse - lse).unsqueeze(-1).to(out.dtype)
        out = torch.lerp(out, other, share)
        lse = torch.logaddexp(lse, other_lse)
    return out
