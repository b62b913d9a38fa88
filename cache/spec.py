"""What a model's layers store per token.

A `LayerGroup` is one or more layers that store the same thing in the same pool. A further kind of
layer adds its name to `LayerKind` and its rules to `cache.components`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from cache.types import PoolName


class LayerKind(Enum):
    """What one layer keeps of the past."""

    FULL = "full"
    """K and V of every position (MHA, GQA, MQA)."""

    WINDOW = "window"
    """K and V of the last positions (sliding window attention)."""

    LATENT = "latent"
    """One compressed vector and one rotary key of every position, for all heads (MLA)."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one pool and one page table.

    `layers` are indices into the model. `num_kv_heads`, `head_dim` describe one layer.
    `dtype_bytes` is the size of one stored element. `window`: the last positions that kind WINDOW
    reads, the newest included; 0 for the others. A latent group has one head, of the compressed
    vector and, as its last `rope_dim` elements, the rotary key. `stored_as`: the dtype of elements
    that are stored in another than the model computes in.
    """

    pool: PoolName
    kind: LayerKind
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int = 0
    rope_dim: int = 0
    stored_as: str | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position takes over all layers of the group: K and V, or what is both."""
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
    def bytes_per_page(self) -> int:
        """Bytes of one page: of all groups together, since a page id is the same in each."""
        return sum(self.pool_bytes_per_page.values())

    @property
    def pool_bytes_per_page(self) -> dict[PoolName, int]:
        """Bytes of one page, by pool."""
        sizes = dict.fromkeys((group.pool for group in self.groups), 0)
        for group in self.groups:
            sizes[group.pool] += group.bytes_per_token * self.page_size
        return sizes


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a server holds: pages per pool (page 0 included) and rows (row 0 excluded)."""

    num_pages: Mapping[PoolName, int]
    num_rows: int
    max_context_len: int
