"""What a forward tells attention, and what attention owes it.

Once per step a backend turns `AttentionMeta` into an `AttentionPlan`: everything that does not
depend on the layer (page runs, views, gather indices, masks) is made there, so that a layer costs
its arithmetic and little else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cache.pool.mha import MhaPool
from cache.pool.page_table import PageTable


@dataclass(frozen=True, slots=True)
class Span:
    """One row's share of a flat batch: positions [start, start + num_tokens) of row `row`.

    They are tokens [offset, offset + num_tokens) of the batch. Everything before `start` is in
    the pool already.
    """

    row: int
    start: int
    num_tokens: int
    offset: int

    @property
    def end(self) -> int:
        """Context length after this forward."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Who attends to what in one forward.

    `spans` in flat order, without gaps; those of the fewest tokens come first, among equals the
    shortest context. `slots`: int64 [tokens], where each token's K and V go.
    """

    spans: tuple[Span, ...]
    slots: Tensor


class AttentionPlan(Protocol):
    """One forward's attention, for every layer of a pool."""

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Store the new K and V of one layer, then attend.

        Args:
            layer: index within the pool.
            q: [tokens, q_heads, head_dim], rotated.
            kv: [tokens, 2 * kv_heads, head_dim], K (rotated) before V.

        Returns:
            [tokens, q_heads * head_dim]. Token t of a span sees its row's positions up to its own.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention over one pool."""

    def plan(self, meta: AttentionMeta) -> AttentionPlan:
        """Prepare one forward. The page table must already hold the forward's pages."""
        ...


class BackendFactory(Protocol):
    """Makes a backend for a pool."""

    def __call__(self, pool: MhaPool, table: PageTable, *, num_heads: int) -> AttentionBackend:
        """`num_heads`: query heads, a multiple of the pool's kv heads."""
        ...
