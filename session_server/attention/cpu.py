"""Compute attention on the CPU: KV is read in place, GQA groups are folded into the queries.

The history of a row is cut into pieces, whose results are merged by log-sum-exp: long runs of pages
are views of the pool, scattered pages are gathered into one piece, and a chunk of new tokens is one
causal piece, read from the projection itself. Rows with the same number of tokens and short
histories are one padded call. docs/models.md says more, also on windows and casts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cache.pool.page_table import PageRun, PageTable
from cache.pool.storage import KvPool
from cache.types import pages_for
from session_server.attention.base import AttentionMeta, AttentionPlan, AttentionRule, Span

MIN_VIEW_BYTES: Final = 1 << 18
"""Runs with more bytes of K and V are read in place; smaller ones are copied (8 GB/s) into one
piece: one more piece costs about 30 us."""

MAX_PADDED_BYTES: Final = 1 << 17
"""Rows with fewer bytes of K and V join the padded batch: a call of their own costs 14 us."""

MAX_CAST_BYTES: Final = 1 << 21
"""Bytes of K and V that are cast at a time if they are stored in another dtype: the copy stays in
the CPU's caches, and its memory is reused instead of returned to the system."""

MIN_PADDED_ROWS: Final = 2

MIN_WINDOW_BLOCK: Final = 64
"""Least number of tokens of a chunk that share one mask; longer windows use their length."""

MAX_FOLDED_TOKENS: Final = 17
"""Spans of at most this many tokens fold them into the GQA group: five tokens then cost 1.2-1.6
times what one costs, and 3-4 times unfolded. Longer spans use the kernel well without folding."""


class CpuBackend:
    """Compute attention in fp32 on the CPU, through torch's flash kernel."""

    def __init__(self, pool: KvPool, table: PageTable, rule: AttentionRule) -> None:
        assert rule.num_heads % pool.num_kv_heads == 0, "query heads divide over kv heads"
        assert pool.device.type == "cpu", "views of the pool are read in place"
        self._pool = pool
        self._table = table
        self._rule = rule
        self._group = rule.num_heads // pool.num_kv_heads
        page_bytes = pool.bytes_per_layer_token * pool.page_size
        self._min_view_pages = max(1, MIN_VIEW_BYTES // page_bytes)
        self._max_padded_len = MAX_PADDED_BYTES // pool.bytes_per_layer_token
        cast_bytes = page_bytes * pool.read_dtype.itemsize // pool.dtype.itemsize
        is_cast = pool.dtype != pool.read_dtype
        self._max_run_pages = max(1, MAX_CAST_BYTES // cast_bytes) if is_cast else None

    def plan(self, meta: AttentionMeta) -> AttentionPlan:
        """Split the spans into padded batches and single rows."""
        parts: list[_PaddedRows | _RowPieces] = []
        spans = meta.spans if self._rule.window is None else self._blocks(meta.spans)
        for num_tokens, group in itertools.groupby(spans, lambda span: span.num_tokens):
            alike = tuple(group)
            num_padded = self._num_padded(alike) if num_tokens <= MAX_FOLDED_TOKENS else 0
            if num_padded:
                parts.append(self._padded(alike[:num_padded]))
            parts += [self._row(span) for span in alike[num_padded:]]
        return _CpuPlan(self._pool, self._rule, meta.slot_mapping[self._pool.name], parts)

    def _blocks(self, spans: tuple[Span, ...]) -> Iterator[Span]:
        """Cut long chunks that exceed their window into blocks."""
        window = self._rule.window
        assert window is not None, "without a window there is nothing to cut"
        size = max(window, MIN_WINDOW_BLOCK)
        for span in spans:
            if span.num_tokens <= size or span.end <= window:
                yield span
                continue
            for done in range(0, span.num_tokens, size):
                num_tokens = min(size, span.num_tokens - done)
                yield Span(span.row, span.start + done, num_tokens, span.offset + done)

    def _num_padded(self, spans: tuple[Span, ...]) -> int:
        """Return how many of these spans, shortest context first, are worth one padded call."""
        lengths = [span.end - self._rule.first_visible(span.start) for span in spans]
        num_short = sum(length <= self._max_padded_len for length in lengths)
        return num_short if num_short >= MIN_PADDED_ROWS else 0

    def _padded(self, spans: tuple[Span, ...]) -> _PaddedRows:
        page_size, num_tokens = self._pool.page_size, spans[0].num_tokens
        firsts = [self._rule.first_visible(span.start) // page_size for span in spans]
        ends = [pages_for(span.end, page_size) for span in spans]
        num_pages = max(end - first for first, end in zip(firsts, ends, strict=True))
        # Pages beyond a row's own are the padding page, and slots beyond its length hold stale KV.
        # The bias masks them, but zero times NaN is NaN: slots that are masked for the whole row
        # are cleared in the copy too.
        pages = np.zeros((len(spans), num_pages), dtype=np.int64)
        for index, (span, first, end) in enumerate(zip(spans, firsts, ends, strict=True)):
            pages[index, : end - first] = self._table.pages(span.row, end, first=first)
        keys = np.array(firsts)[:, None] * page_size + np.arange(num_pages * page_size)
        last = np.array([[span.start] for span in spans]) + np.arange(num_tokens)
        masked = self._masked(last, keys[:, None])
        bias = np.where(masked, np.float32("-inf"), np.float32(0))
        if num_tokens > 1:
            bias = bias.repeat(self._group, axis=1)
        return _PaddedRows(
            spans=spans,
            pages=torch.from_numpy(pages.reshape(-1)),
            masked=torch.from_numpy(np.flatnonzero(masked.all(axis=1))),
            bias=torch.from_numpy(bias[:, None]),
        )

    def _masked(self, queries: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of `keys` [..., 1, n] are masked for `queries` [..., m]: [..., m, n]."""
        masked: NDArray[np.bool_] = keys > queries[..., None]
        if self._rule.window is not None:
            masked |= keys <= queries[..., None] - self._rule.window
        return masked

    def _row(self, span: Span) -> _RowPieces:
        if self._rule.window is not None and span.num_tokens > 1 and span.end > self._rule.window:
            return self._windowed(span)
        first = self._rule.first_visible(span.start)
        if span.num_tokens <= MAX_FOLDED_TOKENS:
            # The pool already holds the new tokens, so they are keys of the history.
            history = self._history(span.row, first, span.end)
            if span.num_tokens == 1:
                return _RowPieces(span, history, includes_new_tokens=True, bias=None)
            if history.num_pieces == 1:
                bias = self._causal(span.num_tokens, span.end)
                return _RowPieces(span, history, includes_new_tokens=True, bias=bias)
            bias = self._causal(span.num_tokens, span.num_tokens)
        else:
            bias = None
        # The tokens of a chunk attend to each other causally, read from the projection.
        history = self._history(span.row, first, span.start)
        return _RowPieces(span, history, includes_new_tokens=False, bias=bias)

    def _windowed(self, span: Span) -> _RowPieces:
        """Prepare several tokens whose windows start at different positions."""
        first = self._rule.first_visible(span.start)
        history = self._history(span.row, first, span.end, is_one_piece=True)
        masked = self._masked(np.arange(span.start, span.end), np.arange(first, span.end)[None])
        bias = torch.zeros(masked.shape).masked_fill_(torch.from_numpy(masked), -torch.inf)
        if span.num_tokens <= MAX_FOLDED_TOKENS:
            bias = bias.repeat_interleave(self._group, dim=0)
        return _RowPieces(
            span, history, includes_new_tokens=True, bias=bias.view(1, 1, *bias.shape)
        )

    def _causal(self, num_tokens: int, num_keys: int) -> Tensor:
        """Return the bias that masks the last `num_tokens` keys causally for folded tokens."""
        bias = torch.zeros(num_tokens, self._group, num_keys)
        unseen = torch.full((num_tokens, num_tokens), -torch.inf).triu_(1)
        bias[:, :, num_keys - num_tokens :] = unseen.unsqueeze(1)
        return bias.view(1, 1, -1, num_keys)

    def _history(self, row: int, first: int, end: int, *, is_one_piece: bool = False) -> _History:
        """Locate positions [first, end) of a row in the pool."""
        if first == end:
            return _History([], None, slice(0))
        page_size = self._pool.page_size
        first_page, end_page = first // page_size, pages_for(end, page_size)
        runs = self._table.runs(row, end_page, first=first_page)
        views: list[tuple[Tensor, ...]] = []
        scattered: list[PageRun] = []
        # Only part of the first and last page may count, so each must begin or end its piece.
        before, behind = first - first_page * page_size, end_page * page_size - end
        if self._max_run_pages is not None and not is_one_piece:
            runs = tuple(_cut(runs, self._max_run_pages))
        for index, (page, count) in enumerate(runs):
            if len(runs) == 1 or (count >= self._min_view_pages and not is_one_piece):
                head = before if index == 0 else 0
                tail = behind if index == len(runs) - 1 else 0
                num_slots = count * page_size - head - tail
                views.append(self._pool.run(page * page_size + head, num_slots))
            else:
                scattered.append((page, count))
        if not scattered:
            return _History(views, None, slice(0))
        pages = np.concatenate([np.arange(page, page + count) for page, count in scattered])
        head = before if scattered[0] == runs[0] else 0
        tail = behind if scattered[-1] == runs[-1] else 0
        counted = slice(head, len(pages) * page_size - tail)
        return _History(views, torch.from_numpy(pages), counted)


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """Hold rows with the same number of tokens.

    `pages`: int64 [rows * pages of the longest]. `masked`: int64 [n], indices into [rows * slots]
    that are masked for all tokens of their row. `bias`: float32 [rows, 1, tokens of a row, slots],
    each token repeated for its GQA group if a row has several tokens.
    """

    spans: tuple[Span, ...]
    pages: Tensor
    masked: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class _History:
    """Locate positions of a row: runs read in place, and pages to gather.

    `views`: views of every layer. `pages`: int64 [n]; `counted` selects the slots of the gathered
    copy that belong to the positions.
    """

    views: list[tuple[Tensor, ...]]
    pages: Tensor | None
    counted: slice

    @property
    def num_pieces(self) -> int:
        """Return the number of attention calls that the history takes."""
        return len(self.views) + (self.pages is not None)


@dataclass(frozen=True, slots=True)
class _RowPieces:
    """Describe one span and its history.

    `includes_new_tokens`: whether the new tokens are the last keys of the history; otherwise they
    are one more piece. `bias`: float32, added to the scores of the keys that include the new
    tokens; -inf masks a key. None if nothing is masked, or only the causal triangle.
    """

    span: Span
    history: _History
    includes_new_tokens: bool
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _CpuPlan:
    """Compute one forward's attention; implements `AttentionPlan`."""

    pool: KvPool
    rule: AttentionRule
    slot_mapping: Tensor
    parts: list[_PaddedRows | _RowPieces]

    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        """Store the new K and V of one layer, then attend; implements `AttentionPlan.attend`."""
        if kv.dtype != self.pool.dtype:
            kv = kv.to(self.pool.dtype)
        self.pool.write(layer, self.slot_mapping, kv)
        mixed = []
        for part in self.parts:
            if isinstance(part, _PaddedRows):
                mixed.append(self._attend_padded(layer, q, part, sinks))
                continue
            own = slice(part.span.offset, part.span.offset + part.span.num_tokens)
            mixed.append(self._attend_row(self._keys(layer, kv[own], part), q[own], part, sinks))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend_padded(
        self, layer: int, q: Tensor, padded: _PaddedRows, sinks: Tensor | None
    ) -> Tensor:
        spans, kv_heads = padded.spans, self.pool.num_kv_heads
        own = q[spans[0].offset : spans[-1].offset + spans[-1].num_tokens]
        gathered = self.pool.gather(layer, padded.pages, padded.masked)
        k, v = gathered.view(2, kv_heads, len(spans), -1, q.shape[-1]).transpose(1, 2)
        folded = _fold(own, len(spans), kv_heads)
        if sinks is not None:
            sinks = _folded_sinks(sinks, kv_heads, spans[0].num_tokens)
        return _unfold(self._mix(folded, [_Keys(k, v, padded.bias)], sinks), own)

    def _attend_row(
        self, keys: list[_Keys], q: Tensor, row: _RowPieces, sinks: Tensor | None
    ) -> Tensor:
        num_tokens, kv_heads = row.span.num_tokens, self.pool.num_kv_heads
        if num_tokens <= MAX_FOLDED_TOKENS:
            if sinks is not None:
                sinks = _folded_sinks(sinks, kv_heads, num_tokens)
            return _unfold(self._mix(_fold(q, 1, kv_heads), keys, sinks), q)
        heads = q.transpose(0, 1).unsqueeze(0)
        out = self._mix(heads, keys, None if sinks is None else sinks.unsqueeze(1))
        return out[0].transpose(0, 1).flatten(1)

    def _keys(self, layer: int, kv: Tensor, row: _RowPieces) -> list[_Keys]:
        """Return K and V of every piece, each [1, kv_heads, length, head_dim]."""
        history = row.history
        bias = row.bias if row.includes_new_tokens else None
        keys = [_Keys(views[2 * layer], views[2 * layer + 1], bias) for views in history.views]
        if history.pages is not None:
            k, v = self.pool.gather(layer, history.pages)[:, None, :, history.counted]
            keys.append(_Keys(k, v, bias))
        if not row.includes_new_tokens:
            k, v = kv.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
            keys.append(_Keys(k, v, row.bias, is_causal=row.bias is None))
        return keys

    def _mix(self, q: Tensor, keys: list[_Keys], sinks: Tensor | None) -> Tensor:
        """Attend to all keys: [rows, heads, queries, head_dim], as `q`.

        `sinks` broadcasts against the first three dimensions.
        """
        rule = self.rule
        if len(keys) == 1 and sinks is None and rule.softcap is None:
            only = _read(keys[0], q.dtype)
            return functional.scaled_dot_product_attention(
                q,
                only.k,
                only.v,
                attn_mask=only.bias,
                is_causal=only.is_causal,
                scale=rule.scale,
                enable_gqa=q.shape[1] != only.k.shape[1],
            )
        parts = (
            [_flash(q, _read(piece, q.dtype), rule) for piece in keys]
            if rule.softcap is None
            else [_capped(q, _read(piece, q.dtype), rule.scale, rule.softcap) for piece in keys]
        )
        out, lse = _merge(parts)
        if sinks is None:
            return out
        # A sink is one more key whose value is zero.
        return out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))


class _Keys(NamedTuple):
    """Hold K and V, each [rows, kv_heads, length, head_dim], and their mask.

    They may be stored in another dtype than that of the queries.
    """

    k: Tensor
    v: Tensor
    bias: Tensor | None
    is_causal: bool = False


def _read(keys: _Keys, dtype: torch.dtype) -> _Keys:
    """Cast keys to the dtype of the queries."""
    if keys.k.dtype == dtype:
        return keys
    k = keys.k.to(dtype)
    return keys._replace(k=k, v=k if keys.v is keys.k else keys.v.to(dtype))


def _cut(runs: Iterable[PageRun], max_pages: int) -> Iterator[PageRun]:
    """Split runs into runs of at most `max_pages` pages."""
    for page, count in runs:
        for done in range(0, count, max_pages):
            yield page + done, min(max_pages, count - done)


def _fold(q: Tensor, num_rows: int, kv_heads: int) -> Tensor:
    """Reshape [rows * tokens, heads, head_dim] to [rows, kv_heads, tokens * group, head_dim]."""
    num_tokens, head_dim = len(q) // num_rows, q.shape[-1]
    if num_tokens == 1:
        return q.reshape(num_rows, kv_heads, -1, head_dim)
    by_head = q.reshape(num_rows, num_tokens, kv_heads, -1, head_dim).transpose(1, 2)
    return by_head.reshape(num_rows, kv_heads, -1, head_dim)


def _unfold(out: Tensor, q: Tensor) -> Tensor:
    """Reshape attention over `_fold`ed queries `q` to [rows * tokens, heads * head_dim]."""
    num_rows, kv_heads = out.shape[:2]
    if len(q) == num_rows:
        return out.reshape(num_rows, -1)
    by_token = out.view(num_rows, kv_heads, len(q) // num_rows, -1, q.shape[-1]).transpose(1, 2)
    return by_token.reshape(len(q), -1)


def _folded_sinks(sinks: Tensor, kv_heads: int, num_tokens: int) -> Tensor:
    """Repeat sinks for every folded query: [q_heads] -> [kv_heads, tokens * group]."""
    return sinks.view(kv_heads, 1, -1).expand(-1, num_tokens, -1).reshape(kv_heads, -1)


def _flash(q: Tensor, keys: _Keys, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Compute attention and its log-sum-exp; q heads may be a multiple of kv heads.

    Returns:
        ([rows, heads, queries, head_dim], [rows, heads, queries]).
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, keys.k, keys.v, 0.0, keys.is_causal, attn_mask=keys.bias, scale=rule.scale
    )
    return out, lse


def _capped(q: Tensor, keys: _Keys, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Compute what `_flash` does with soft-capped scores, which the kernel does not support."""
    grouped = q.reshape(len(q), keys.k.shape[1], -1, *q.shape[2:])
    k, v = keys.k.unsqueeze(2), keys.v.unsqueeze(2)
    scores = (grouped @ k.transpose(-1, -2)).float()
    scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if keys.is_causal:
        scores += torch.full(scores.shape[-2:], -torch.inf).triu_(1)
    if keys.bias is not None:
        scores += keys.bias.unsqueeze(2)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp_().to(v.dtype) @ v
    return out.flatten(1, 2), lse.flatten(1, 2)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint sets of keys into attention over their union."""
    out, lse = parts[0]
    for other, other_lse in parts[1:]:
        share = torch.sigmoid(other_lse - lse).unsqueeze(-1).to(out.dtype)
        out = torch.lerp(out, other, share)
        lse = torch.logaddexp(lse, other_lse)
    return out, lse
