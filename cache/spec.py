"""What a model's layers store per token.

A `LayerGroup` is one or more layers that store the same thing in the same pool. A further kind of
layer adds its name to `LayerKind` and its rules to `cache.components`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cache.types import PoolName

STATES_PER_ROW: Final = 9
"""The most states that one row holds: while a turn runs, at its mark, at its computed length and at
the last whole page before that; at the ends of two launches in flight and at the last whole pages
before those; and the snapshots that it has locked, at its mark and at what it has published."""


STATES_IN_FLIGHT: Final = 4
"""Those of them that two launches leave, two each."""


class LayerKind(Enum):
    """What one layer keeps of the past."""

    FULL = "full"
    """K and V of every position (MHA, GQA, MQA)."""

    WINDOW = "window"
    """K and V of the last positions (sliding window attention)."""

    LATENT = "latent"
    """One compressed vector and one rotary key of every position, for all heads (MLA)."""

    RECURRENT = "recurrent"
    """A summary of all positions, of a size that does not grow; a page of its pool is one."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one pool and one page table.

    `layers` are indices into the model. `num_kv_heads`, `head_dim` describe one layer.
    `dtype_bytes`: size of one stored element. `window`: the last positions that kind WINDOW reads,
    the newest included; 0 for the others. A latent group has one head: the latent and, as its last
    `qk_rope_head_dim` elements, the rotary key. `stored_as`: the dtype of stored elements where it
    differs from the activations'. `state_shapes`: the parts of one recurrent layer's state, in
    elements of 4 bytes; such a group has neither heads nor positions.
    """

    pool: PoolName
    kind: LayerKind
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int = 0
    qk_rope_head_dim: int = 0
    stored_as: str | None = None
    state_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state of all layers of a recurrent group."""
        return len(self.layers) * sum(map(math.prod, self.state_shapes)) * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position takes over all layers of the group: K and V, or what is both; none
        where a state stands for all of them."""
        num_sides = 1 if self.kind is LayerKind.LATENT else 2
        num_elements = num_sides * len(self.layers) * self.num_kv_heads * self.head_dim
        return num_elements * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Everything bookkeeping and tensor pools must agree on."""

    groups: tuple[LayerGroup, ...]
    page_size: int

    @property
    def stored_as(self) -> str | None:
        """Of the groups that store elements in another dtype than the model computes in."""
        return next((group.stored_as for group in self.groups if group.stored_as), None)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state in all groups together."""
        return sum(group.bytes_per_state for group in self.recurrent)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page of positions in all groups together, states aside."""
        return sum(self.paged_bytes_per_page.values())

    @property
    def pool_bytes_per_page(self) -> dict[PoolName, int]:
        """Bytes of one page, by pool."""
        return self.paged_bytes_per_page | {g.pool: g.bytes_per_state for g in self.recurrent}

    @property
    def paged_bytes_per_page(self) -> dict[PoolName, int]:
        """Bytes of one page, by pool whose pages are of positions."""
        paged = [group for group in self.groups if group.kind is not LayerKind.RECURRENT]
        sizes = dict.fromkeys((group.pool for group in paged), 0)
        for group in paged:
            sizes[group.pool] += group.bytes_per_token * self.page_size
        return sizes

    @property
    def recurrent(self) -> tuple[LayerGroup, ...]:
        """The groups that keep states."""
        return tuple(group for group in self.groups if group.kind is LayerKind.RECURRENT)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a server holds: pages per pool (page 0 included) and rows (row 0 excluded).

    `num_states`: pages of the recurrent pool, which is not among the others, page 0 included.
    """

    num_pages: Mapping[PoolName, int]
    num_rows: int
    max_context_len: int
    num_states: int = 0

    def pool_pages(self, spec: CacheSpec) -> dict[PoolName, int]:
        """Pages of every pool, that of states included."""
        return dict(self.num_pages) | {group.pool: self.num_states for group in spec.recurrent}
