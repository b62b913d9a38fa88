"""Describe what a model's layers store per token.

A `LayerGroup` is one or more layers that store the same thing in the same pool. A new kind of layer
adds a name to `LayerKind` and its rules to `cache.components`.
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
"""Those of `STATES_PER_ROW` that two launches in flight write, two each."""


class LayerKind(Enum):
    """Name what a layer stores of earlier positions."""

    FULL = "full"
    """K and V of every position (MHA, GQA, MQA)."""

    WINDOW = "window"
    """K and V of the last positions (sliding window attention)."""

    LATENT = "latent"
    """One compressed vector and one rotary key of every position, for all heads (MLA)."""

    RECURRENT = "recurrent"
    """One state of fixed size for all positions; a page of its pool is one state."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Describe layers that share one pool and one page table.

    `layers` are indices into the model. `num_kv_heads`, `head_dim` describe one layer.
    `dtype_bytes`: size of one stored element. `window`: the last positions that kind WINDOW reads,
    the newest included; 0 for the others. A latent group has one head: the latent and, as its last
    `qk_rope_head_dim` elements, the rotary key. `kv_dtype`: the dtype of stored elements where it
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
    kv_dtype: str | None = None
    state_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def bytes_per_state(self) -> int:
        """Return the bytes of one state of all layers of a recurrent group."""
        return len(self.layers) * sum(map(math.prod, self.state_shapes)) * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one position in all layers of the group: K and V, or one latent for
        both; 0 for a recurrent group."""
        num_sides = 1 if self.kind is LayerKind.LATENT else 2
        num_elements = num_sides * len(self.layers) * self.num_kv_heads * self.head_dim
        return num_elements * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Describe the layout of KV that accounts and tensor pools must agree on."""

    groups: tuple[LayerGroup, ...]
    page_size: int

    @property
    def kv_dtype(self) -> str | None:
        """Return the storage dtype, if a group stores another one than the model computes in."""
        return next((group.kv_dtype for group in self.groups if group.kv_dtype), None)

    @property
    def bytes_per_state(self) -> int:
        """Return the bytes of one state in all groups together."""
        return sum(group.bytes_per_state for group in self.recurrent)

    @property
    def bytes_per_page(self) -> int:
        """Return the bytes of one page of positions in all groups together, without states."""
        return sum(self.paged_bytes_per_page.values())

    @property
    def pool_bytes_per_page(self) -> dict[PoolName, int]:
        """Return the bytes of one page, by pool."""
        return self.paged_bytes_per_page | {g.pool: g.bytes_per_state for g in self.recurrent}

    @property
    def paged_bytes_per_page(self) -> dict[PoolName, int]:
        """Return the bytes of one page, by pool, for all pools but the recurrent one."""
        paged = [group for group in self.groups if group.kind is not LayerKind.RECURRENT]
        sizes = dict.fromkeys((group.pool for group in paged), 0)
        for group in paged:
            sizes[group.pool] += group.bytes_per_token * self.page_size
        return sizes

    @property
    def recurrent(self) -> tuple[LayerGroup, ...]:
        """Return the recurrent groups."""
        return tuple(group for group in self.groups if group.kind is LayerKind.RECURRENT)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Set the size of a cache: pages per pool (including page 0) and rows (excluding row 0).

    `num_states`: pages of the recurrent pool, which is not among the others, page 0 included.
    """

    num_pages: Mapping[PoolName, int]
    num_rows: int
    max_context_len: int
    num_states: int = 0

    def pool_pages(self, spec: CacheSpec) -> dict[PoolName, int]:
        """Return the pages of every pool, including the recurrent one."""
        return dict(self.num_pages) | {group.pool: self.num_states for group in spec.recurrent}
