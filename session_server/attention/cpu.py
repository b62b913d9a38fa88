"""Attention on the CPU: in place over extents, GQA group folded into the queries.

Attention over a set of keys can be split and merged by log-sum-exp (Milakov and Gimelshein 2018;
the rule of split-KV decoding), and a token sees *all* of its history, in any order. So the history
of a row is cut into pieces that are cheap to read: long runs of consecutive pages are views of the
pool, and whatever is scattered is gathered into one piece. A chunk of new tokens adds one causal
piece, read from the projection itself, and needs no mask.

Single tokens of several rows with short histories are one padded call: there the overhead of a
call costs more than copying a few pages.
"""

from __future__ import annotations

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
        page_bytes = pool.bytes_per_layer_token * pool.page_size
        self._min_view_pages = max(1, MIN_VIEW_BYTES // page_bytes)
        self._max_padded_len = MAX_PADDED_BYTES // pool.bytes_per_layer_token

    def plan(self, meta: AttentionMeta) -> AttentionPlan:
        """Sort the spans into one padded batch and rows on their own."""
        # Single tokens come first, shortest first, so the padded batch is a prefix.
        num_padded = 0
        for span in meta.spans:
            if span.num_tokens > 1 or span.end > self._max_padded_len:
                break
            num_padded += 1
        if num_padded < MIN_PADDED_ROWS:
            num_padded = 0
        padded = self._padded(meta.spans[:num_padded]) if num_padded else None
        rows = [self._row(span) for span in meta.spans[num_padded:]]
        return _CpuPlan(self._pool, meta.slots, padded, rows)

    def _padded(self, spans: tuple[Span, ...]) -> _PaddedRows:
        page_size = self._pool.page_size
        num_pages = pages_for(spans[-1].end, page_size)
        pages = np.stack([self._table.pages(span.row, num_pages) for span in spans])
        lengths = np.array([span.end for span in spans])
        # Entries beyond a row's own length may name other rows' pages, and cells beyond it hold
        # what an earlier holder left. The mask hides them, but zero times NaN is NaN: the copies
        # of what is hidden are cleared too.
        hidden = np.arange(num_pages * page_size) >= lengths[:, None]
        bias = np.where(hidden, np.float32("-inf"), np.float32(0))[:, None, None, :]
        return _PaddedRows(
            num_rows=len(spans),
            pages=torch.from_numpy(pages.astype(np.int64).reshape(-1)),
            hidden=torch.from_numpy(np.flatnonzero(hidden)),
            bias=torch.from_numpy(bias),
        )

    def _row(self, span: Span) -> _RowPieces:
        # One new token is part of what it sees; the tokens of a chunk see each other causally,
        # from the projection.
        length = span.end if span.num_tokens == 1 else span.start
        page_size = self._pool.page_size
        views: list[tuple[Tensor, ...]] = []
        scattered: list[PageRun] = []
        num_pages = pages_for(length, page_size)
        runs = self._table.runs(span.row, num_pages) if length else ()
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
            return _RowPieces(span, views, None, 0)
        pages = np.concatenate([np.arange(first, first + count) for first, count in scattered])
        ends_scattered = runs[-1] == scattered[-1]
        num_slots = len(pages) * page_size - (unused if ends_scattered else 0)
        return _RowPieces(span, views, torch.from_numpy(pages), num_slots)


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """Single tokens of `num_rows` rows. `pages`: int64 [rows * pages of the longest]. `hidden`:
    int64 [n], indices into [rows * slots] where no row looks. `bias`: float32
    [rows, 1, 1, slots], 0 where a row may look."""

    num_rows: int
    pages: Tensor
    hidden: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class _RowPieces:
    """One span and its history: runs in place (views of every layer), the rest to gather."""

    span: Span
    views: list[tuple[Tensor, ...]]
    gathered_pages: Tensor | None
    num_gathered: int


class _CpuPlan:
    """See `AttentionPlan`."""

    __slots__ = ("_padded", "_pool", "_rows", "_slots")

    def __init__(
        self,
        pool: MhaPool,
        slots: Tensor,
        padded: _PaddedRows | None,
        rows: list[_RowPieces],
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._padded = padded
        self._rows = rows

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `AttentionPlan.attend`."""
        self._pool.write(layer, self._slots, kv)
        mixed = []
        if self._padded is not None:
            mixed.append(self._attend_padded(layer, q[: self._padded.num_rows], self._padded))
        for row in self._rows:
            offset, num_tokens = row.span.offset, row.span.num_tokens
            row_q = q[offset : offset + num_tokens]
            if num_tokens == 1:
                mixed.append(self._attend_token(layer, row_q, row))
            else:
                row_kv = kv[offset : offset + num_tokens]
                mixed.append(self._attend_chunk(layer, row_q, row_kv, row))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend_padded(self, layer: int, q: Tensor, padded: _PaddedRows) -> Tensor:
        num_rows, kv_heads, head_dim = padded.num_rows, self._pool.num_kv_heads, q.shape[-1]
        gathered = self._pool.gather(layer, padded.pages).index_fill_(2, padded.hidden, 0.0)
        k, v = gathered.view(2, kv_heads, num_rows, -1, head_dim).transpose(1, 2)
        folded = q.reshape(num_rows, kv_heads, -1, head_dim)
        out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=padded.bias)
        return out.reshape(num_rows, -1)

    def _attend_token(self, layer: int, q: Tensor, row: _RowPieces) -> Tensor:
        folded = q.reshape(1, self._pool.num_kv_heads, -1, q.shape[-1])
        pieces = self._history(layer, row)
        if len(pieces) == 1:
            k, v = pieces[0]
            return functional.scaled_dot_product_attention(folded, k, v).reshape(1, -1)
        parts = [_flash(folded, k, v) for k, v in pieces]
        return _merge(parts).reshape(1, -1)

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


def _flash(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; q heads may be a multiple of kv heads.

    Returns:
        ([1, heads, queries, head_dim], [1, heads, queries]).
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, is_causal
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
