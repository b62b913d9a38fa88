"""What a forward tells attention, and what attention owes it.

Once per step a backend turns `AttentionMeta` into an `AttentionPlan`: everything that does not
depend on the layer (page runs, views, gather indices, masks) is made there, so that a layer costs
its arithmetic and little else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cache.pool.base import KvPages
from cache.pool.page_table import PageTable
from cache.types import PoolName, StateMoves


@dataclass(frozen=True, slots=True)
class Span:
    """One row's share of a flat batch: positions [start, start + num_tokens) of row `row`.

    They are tokens [offset, offset + num_tokens) of the batch. Everything before `start` is in
    the pool already. `states`: what it does to the row's recurrent state; None where no layer has
    one, and for padding.
    """

    row: int
    start: int
    num_tokens: int
    offset: int
    states: StateMoves | None = None

    @property
    def end(self) -> int:
        """Context length after this forward."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Who attends to what in one forward.

    `spans` in flat order, without gaps; those of the fewest tokens come first, among equals the
    shortest context. `slot_mapping`: int64 [tokens], where each token's K and V go, by pool.
    """

    spans: tuple[Span, ...]
    slot_mapping: Mapping[PoolName, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How the layers of one pool attend.

    `num_heads`: query heads, a multiple of the pool's kv heads. `scale`: factor on the scores.
    `window`: positions a token sees, its own included; None for all. `softcap`: scores `s` become
    `softcap * tanh(s / softcap)`.
    """

    num_heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    def first_visible(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


class AttentionPlan(Protocol):
    """One forward's attention, for every layer of a pool."""

    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        """Store the new K and V of one layer, then attend.

        Args:
            layer: index within the pool.
            q: [tokens, q_heads, head_dim], rotated.
            kv: [tokens, 2 * kv_heads, head_dim], K (rotated) before V.
            sinks: [q_heads], a score of each head that takes its share and brings no value (Xiao
                et al. 2024, as gpt-oss learns it); None without.

        Returns:
            [tokens, q_heads * head_dim]. Token t of a span sees its row's positions up to its own,
            as far back as the rule says.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention over one pool."""

    def plan(self, meta: AttentionMeta) -> AttentionPlan:
        """Prepare one forward. The page table must already hold the forward's pages.

        Entries before the first position that a span sees are not looked at: they may be gone.
        """
        ...


class BackendFactory(Protocol):
    """Makes a backend for a pool."""

    def __call__(self, pool: KvPages, table: PageTable, rule: AttentionRule) -> AttentionBackend:
        """`table`: of the pool. `rule`: of its layers."""
        ...
