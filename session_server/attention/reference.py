"""The `torch` backend: gather each row's pages and call SDPA. Correct everywhere, first of all.

Every other backend is tested against this one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cache.pool.mha import MhaPool
from cache.pool.page_table import PageTable
from cache.types import pages_for
from session_server.attention.base import AttentionMeta, AttentionPlan, Span


class ReferenceBackend:
    """Row by row, through copies; works on any device and in any dtype."""

    def __init__(self, pool: MhaPool, table: PageTable, *, num_heads: int) -> None:
        """Args:
        pool: the K and V.
        table: which pages are whose.
        num_heads: query heads.
        """
        assert num_heads % pool.num_kv_heads == 0, "query heads divide over kv heads"
        self._pool = pool
        self._table = table

    def plan(self, meta: AttentionMeta) -> AttentionPlan:
        """Look up every row's pages once."""
        rows = []
        for span in meta.spans:
            num_pages = pages_for(span.end, self._pool.page_size)
            pages = self._table.device_pages[span.row, :num_pages].long()
            rows.append((span, pages, self._mask(span)))
        return _ReferencePlan(self._pool, meta.slots, rows)

    def _mask(self, span: Span) -> Tensor | None:
        if span.num_tokens == 1:
            return None
        # Query i of the span stands at position start + i and sees keys up to there.
        ones = torch.ones((span.num_tokens, span.end), dtype=torch.bool, device=self._pool.device)
        return ones.tril_(span.start)


class _ReferencePlan:
    """See `AttentionPlan`."""

    __slots__ = ("_pool", "_rows", "_slots")

    def __init__(
        self, pool: MhaPool, slots: Tensor, rows: list[tuple[Span, Tensor, Tensor | None]]
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._rows = rows

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `AttentionPlan.attend`."""
        self._pool.write(layer, self._slots, kv)
        mixed = []
        for span, pages, mask in self._rows:
            k, v = self._pool.gather(layer, pages)[:, None, :, : span.end]
            row_q = q[span.offset : span.offset + span.num_tokens].transpose(0, 1).unsqueeze(0)
            out = functional.scaled_dot_product_attention(
                row_q, k, v, attn_mask=mask, enable_gqa=True
            )
            mixed.append(out[0].transpose(0, 1).flatten(1))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)
