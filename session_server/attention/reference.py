"""Compute attention by gathering each row's pages and calling SDPA: the `torch` backend.

It favors correctness; every other backend is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cache.pool.page_table import PageTable
from cache.pool.storage import KvPool
from cache.types import pages_for
from session_server.attention.base import AttentionMeta, AttentionPlan, AttentionRule, Span


class ReferenceBackend:
    """Compute attention row by row, through copies; works on any device and in any dtype."""

    def __init__(self, pool: KvPool, table: PageTable, rule: AttentionRule) -> None:
        assert rule.num_heads % pool.num_kv_heads == 0, "query heads divide over kv heads"
        self._pool = pool
        self._table = table
        self._rule = rule

    def plan(self, meta: AttentionMeta) -> AttentionPlan:
        """Look up every row's pages once."""
        rows = [self._row(span) for span in meta.spans]
        return _ReferencePlan(self._pool, self._rule, meta.slot_mapping[self._pool.name], rows)

    def _row(self, span: Span) -> _Row:
        page_size, device = self._pool.page_size, self._pool.device
        first = self._rule.first_visible(span.start)
        first_page, end_page = first // page_size, pages_for(span.end, page_size)
        pages = self._table.device_pages[span.row, first_page:end_page].long()
        first_slot = first % page_size
        end_slot = first_slot + span.end - first
        if span.num_tokens == 1:
            # With a mask, even an empty one, SDPA does not use its fastest kernels.
            return _Row(span, pages, first_slot, end_slot, None)
        queries = torch.arange(span.start, span.end, device=device).unsqueeze(1)
        keys = torch.arange(first, span.end, device=device)
        seen = keys <= queries
        if self._rule.window is not None:
            seen &= keys > queries - self._rule.window
        return _Row(span, pages, first_slot, end_slot, seen)


@dataclass(frozen=True, slots=True)
class _Row:
    """Describe one span.

    `pages`: int64 [n]; the keys are slots [first_slot, end_slot) of the gathered pages. `seen`:
    bool [tokens, keys]; None if a single token attends to all of them.
    """

    span: Span
    pages: Tensor
    first_slot: int
    end_slot: int
    seen: Tensor | None


@dataclass(frozen=True, slots=True)
class _ReferencePlan:
    """Compute one forward's attention; implements `AttentionPlan`."""

    pool: KvPool
    rule: AttentionRule
    slot_mapping: Tensor
    rows: list[_Row]

    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        """Store the new K and V of one layer, then attend; implements `AttentionPlan.attend`."""
        self.pool.write(layer, self.slot_mapping, kv)
        mixed = []
        for row in self.rows:
            span = row.span
            k, v = self.pool.gather(layer, row.pages)[:, None, :, row.first_slot : row.end_slot]
            row_q = q[span.offset : span.offset + span.num_tokens].transpose(0, 1).unsqueeze(0)
            if self.rule.softcap is None and sinks is None:
                out = self._sdpa(row_q, k, v, row.seen)
            else:
                k, v = (side.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for side in (k, v))
                out = self._softmax(row_q, k, row.seen, sinks).to(v.dtype) @ v
            mixed.append(out[0].transpose(0, 1).flatten(1))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """Attend with SDPA: [1, heads, queries, head_dim], as `q`."""
        if q.shape[2] > 1:
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=self.rule.scale, enable_gqa=True
            )
        # The heads of a GQA group share keys: as queries of one head they read them once.
        grouped = q.reshape(1, k.shape[1], -1, q.shape[3])
        out = functional.scaled_dot_product_attention(grouped, k, v, scale=self.rule.scale)
        return out.reshape(q.shape)

    def _softmax(self, q: Tensor, k: Tensor, seen: Tensor | None, sinks: Tensor | None) -> Tensor:
        """Return attention weights in fp32, [1, heads, queries, keys]: SDPA lacks softcap and
        sinks.
        """
        scores = (q @ k.transpose(-1, -2)).float() * self.rule.scale
        if self.rule.softcap is not None:
            scores = self.rule.softcap * torch.tanh(scores / self.rule.softcap)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is None:
            return scores.softmax(-1)
        of_heads = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, of_heads), dim=-1).softmax(-1)[..., :-1]
