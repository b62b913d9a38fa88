"""Compute multi-head latent attention (MLA; DeepSeek-AI 2024, section 2.1).

A position stores a latent `c` of `rank` (`kv_lora_rank`) elements and a rotary key `r`. Head h has
two matrices: its key is (U_h c, r) and its value is V_h c. There are two ways to use them.

*Absorbed*: since q . (U_h c) = (q U_h) . c, the query is projected to the latent space once, and
V_h projects the weighted sum of latents once. So attention reads the stored rows directly: it is
multi-query attention (Shazeer 2019) with one head whose key is its value, and a backend for that
computes it. The history is never expanded.

*Expanded*: K and V of all heads are computed from the latents of the history and of the new tokens,
block by block, followed by multi-head attention over shorter vectors. This is cheaper for long
spans; docs/models.md derives from how many tokens on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from cache.pool.mla import MlaPool
from cache.pool.page_table import PageTable
from cache.types import PoolName, pages_for
from session_server.attention.base import (
    AttentionMeta,
    AttentionPlan,
    AttentionRule,
    BackendFactory,
    CapturableBackend,
    DeviceRows,
    GraphPlan,
    Span,
)

BLOCK_LEN: Final = 512
"""Positions that are expanded to K and V at a time."""


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Describe what the pool does not know of a head: sizes of non-rotary key and of value."""

    qk_nope_head_dim: int
    v_head_dim: int


def min_expanded_tokens(*, kv_lora_rank: int, qk_nope_head_dim: int, v_head_dim: int) -> float:
    """Return the fewest new tokens for which expanding is cheaper; infinite if it never is."""
    expanded = qk_nope_head_dim + v_head_dim
    saved = 2 * kv_lora_rank - expanded
    return kv_lora_rank * expanded / saved if saved > 0 else math.inf


class MlaBackend:
    """Choose per span: expand it, or pass it absorbed to a multi-query backend."""

    def __init__(
        self,
        pool: MlaPool,
        table: PageTable,
        rule: AttentionRule,
        shape: MlaShape,
        *,
        absorbed: BackendFactory,
        expand_from: float | None = None,
    ) -> None:
        """Create the backend.

        `absorbed`: creates the backend that attends to latents. `expand_from`: new tokens from
        which a span is expanded; None for the cheaper choice.
        """
        assert rule.window is None, "latents are kept of every position"
        assert rule.softcap is None, "scores of latents are not squashed"
        self._pool = pool
        self._table = table
        self._rule = rule
        self._shape = shape
        self._absorbed = absorbed(pool, table, rule)
        if expand_from is None:
            expand_from = min_expanded_tokens(
                kv_lora_rank=pool.kv_lora_rank,
                qk_nope_head_dim=shape.qk_nope_head_dim,
                v_head_dim=shape.v_head_dim,
            )
        self._expand_from = expand_from

    def plan(self, meta: AttentionMeta) -> MlaPlan:
        """Prepare one forward; spans are sorted by number of tokens: absorbed ones come first."""
        absorbed = tuple(s for s in meta.spans if s.num_tokens < self._expand_from)
        expanded = meta.spans[len(absorbed) :]
        slot_mapping = meta.slot_mapping[self._pool.name]
        num_absorbed = expanded[0].offset if expanded else len(slot_mapping)
        plan = None
        if absorbed:
            of_absorbed = {self._pool.name: slot_mapping[:num_absorbed]}
            plan = self._absorbed.plan(AttentionMeta(absorbed, of_absorbed))
        return MlaPlan(
            self._pool,
            self._rule,
            self._shape,
            slot_mapping[num_absorbed:],
            absorbed=plan,
            expanded=[_Chunk(span, self._blocks(span)) for span in expanded],
        )

    def compile_all(self, *, has_sinks: bool) -> None:
        """Compile what attends to latents; as `CapturableBackend.compile_all`."""
        cast(CapturableBackend, self._absorbed).compile_all(has_sinks=has_sinks)

    def plan_graph(self, num_rows: int, max_row_tokens: int, longest: int) -> MlaGraphPlan:
        """Prepare forwards of few tokens a row; as `CapturableBackend.plan_graph`. They are
        absorbed."""
        backend = cast(CapturableBackend, self._absorbed)
        return MlaGraphPlan(self, backend.plan_graph(num_rows, max_row_tokens, longest))

    def absorb(self, plan: AttentionPlan) -> MlaPlan:
        """Return the plan of a forward whose every token is absorbed, by a plan for latents."""
        none = torch.empty(0, dtype=torch.int64, device=self._pool.device)
        return MlaPlan(self._pool, self._rule, self._shape, none, absorbed=plan, expanded=[])

    def _blocks(self, span: Span) -> list[_Block]:
        """Split all positions that the span attends to into blocks, in order."""
        page_size = self._pool.page_size
        num_pages = pages_for(span.end, page_size)
        pages = self._table.device_pages[span.row, :num_pages].long()
        blocks, start = [], 0
        for of_block in torch.split(pages, max(1, BLOCK_LEN // page_size)):
            end = min(start + len(of_block) * page_size, span.end)
            blocks.append(_Block(of_block, start, end - start, self._masked(span, start, end)))
            start = end
        return blocks

    def _masked(self, span: Span, start: int, end: int) -> Tensor | None:
        """Return the causal mask of a block for the tokens that see any of it, if needed."""
        if end <= span.start + 1:
            return None
        first_query = max(span.start, start)
        shape = (span.end - first_query, end - start)
        ones = torch.ones(shape, dtype=torch.bool, device=self._pool.device)
        return ones.triu_(first_query - start + 1)


@dataclass(frozen=True, slots=True)
class MlaGraphPlan:
    """Attend absorbed from rows that are told on the device; implements `GraphPlan`."""

    backend: MlaBackend
    absorbed: GraphPlan

    def refresh(self, rows: DeviceRows) -> None:
        """Attend from other rows from now on; as `GraphPlan.refresh`."""
        self.absorbed.refresh(rows)

    def plan(self, slot_mapping: Mapping[PoolName, Tensor]) -> MlaPlan:
        """Return the plan; as `GraphPlan.plan`."""
        return self.backend.absorb(self.absorbed.plan(slot_mapping))


@dataclass(frozen=True, slots=True)
class _Block:
    """Describe `num_keys` positions from `start` on.

    `pages`: int64 [n]. `masked`: bool [queries at `start` or later, num_keys], None if nothing is
    masked.
    """

    pages: Tensor
    start: int
    num_keys: int
    masked: Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Hold a span that is expanded, and the blocks it attends to."""

    span: Span
    blocks: list[_Block]


@dataclass(frozen=True, slots=True)
class MlaPlan:
    """Compute one forward's latent attention, for every layer of a pool.

    `slot_mapping`: int64 [expanded tokens], the slots of their rows. `absorbed`: attention of the
    absorbed tokens, which come first. `expanded`: the spans that follow.
    """

    pool: MlaPool
    rule: AttentionRule
    shape: MlaShape
    slot_mapping: Tensor
    absorbed: AttentionPlan | None
    expanded: list[_Chunk]

    def attend(self, layer: int, q: Tensor, rows: Tensor, up: Tensor) -> Tensor:
        """Store the new latents of one layer, then attend.

        Args:
            layer: index within the pool.
            q: [tokens, heads, nope + rope], the rotary part rotated.
            rows: [tokens, latent + rope], the latent normalized, the rotary key rotated.
            up: [heads, nope + value, latent], projects a latent to K and V.

        Returns:
            [tokens, heads * value]. A token attends to its row's positions up to its own.
        """
        num_absorbed = len(q) - len(self.slot_mapping)
        mixed = []
        if self.absorbed is not None:
            mixed.append(self._absorb(layer, q[:num_absorbed], rows[:num_absorbed], up))
        if self.expanded:
            self.pool.write(layer, self.slot_mapping, _as_kv(rows[num_absorbed:]))
        for chunk in self.expanded:
            span = chunk.span
            own = q[span.offset : span.offset + span.num_tokens]
            mixed.append(self._expand(layer, own, chunk, up))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _absorb(self, layer: int, q: Tensor, rows: Tensor, up: Tensor) -> Tensor:
        assert self.absorbed is not None, "`attend` calls this for absorbed tokens only"
        qk_nope_head_dim, num_tokens = self.shape.qk_nope_head_dim, len(q)
        to_latents = torch.bmm(q[..., :qk_nope_head_dim].transpose(0, 1), up[:, :qk_nope_head_dim])
        absorbed = torch.cat((to_latents.transpose(0, 1), q[..., qk_nope_head_dim:]), dim=-1)
        mixed = self.absorbed.attend(layer, absorbed, _as_kv(rows), None)
        latents = mixed.view(num_tokens, self.rule.num_heads, -1)[..., : self.pool.kv_lora_rank]
        values = torch.bmm(latents.transpose(0, 1), up[:, qk_nope_head_dim:].transpose(1, 2))
        return values.transpose(0, 1).flatten(1)

    def _expand(self, layer: int, q: Tensor, chunk: _Chunk, up: Tensor) -> Tensor:
        """Attend to blocks of keys, merged by log-sum-exp (Milakov and Gimelshein 2018)."""
        heads = q.transpose(0, 1)
        shape = (self.rule.num_heads, chunk.span.num_tokens, self.shape.v_head_dim)
        out = torch.zeros(shape, dtype=torch.float32, device=q.device)
        lse = out.new_full(shape[:2], -math.inf)
        for block in chunk.blocks:
            first = max(0, block.start - chunk.span.start)
            part, part_lse = self._attend_block(layer, heads[:, first:], block, up)
            seen_lse = lse[:, first:]
            share = torch.sigmoid(part_lse - seen_lse).unsqueeze(-1)
            out[:, first:].lerp_(part, share)
            torch.logaddexp(seen_lse, part_lse, out=seen_lse)
        return out.to(q.dtype).transpose(0, 1).flatten(1)

    def _attend_block(
        self, layer: int, q: Tensor, block: _Block, up: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return attention to one block, float32 [heads, queries, value], and its log-sum-exp."""
        rank, qk_nope_head_dim = self.pool.kv_lora_rank, self.shape.qk_nope_head_dim
        rows = self.pool.gather(layer, block.pages)[0, 0, : block.num_keys]
        expanded = torch.matmul(rows[:, :rank], up.flatten(0, 1).t())
        keys_values = expanded.view(block.num_keys, len(up), -1).transpose(0, 1)
        scores = torch.matmul(q[..., qk_nope_head_dim:], rows[:, rank:].t())
        scores = torch.baddbmm(
            scores, q[..., :qk_nope_head_dim], keys_values[..., :qk_nope_head_dim].mT
        )
        scores = scores.float().mul_(self.rule.scale)
        if block.masked is not None:
            scores.masked_fill_(block.masked, -math.inf)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(q.dtype)
        return torch.bmm(weights, keys_values[..., qk_nope_head_dim:]).float(), lse


def _as_kv(rows: Tensor) -> Tensor:
    """Return rows as K and V of one head: [tokens, n] -> [tokens, 2, n], without a copy."""
    return rows.unsqueeze(1).expand(-1, 2, -1)
