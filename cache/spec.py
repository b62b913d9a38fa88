"""What a model's layers store per token, and how many pages a memory budget buys.

A `LayerGroup` is one or more layers that store the same thing in the same pool. A further kind of
layer adds its name to `LayerKind` and its rules to `cache.components`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

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
    vector and, as its last `rope_dim` elements, the rotary key.
    """

    pool: PoolName
    kind: LayerKind
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int = 0
    rope_dim: int = 0

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
    def bytes_per_page(self) -> int:
        """Bytes of one page: of all groups together, since a page id is the same in each."""
        return sum(group.bytes_per_token for group in self.groups) * self.page_size


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a server holds: pages per pool (page 0 included) and rows (row 0 excluded)."""

    num_pages: Mapping[PoolName, int]
    num_rows: int
    max_context_len: int


def plan_capacity(
    spec: CacheSpec,
    *,
    budget_bytes: int,
    num_rows: int,
    max_context_len: int,
    max_total_tokens: int | None = None,
) -> Capacity:
    """Spend `budget_bytes` on pages.

    Args:
        spec: what a page costs.
        budget_bytes: memory for all pools together.
        num_rows: sessions that can hold KV at the same time.
        max_context_len: tokens one row can address.
        max_total_tokens: an upper bound on the tokens held, whatever the budget allows.

    Raises:
        ValueError: the budget buys less than one page beside the padding page.
    """
    per_page = spec.bytes_per_page
    num_pages = budget_bytes // per_page
    if max_total_tokens is not None:
        num_pages = min(num_pages, -(-max_total_tokens // spec.page_size) + 1)
    if num_pages < 2:
        raise ValueError(
            f"{budget_bytes} bytes for KV buy {num_pages} pages of {per_page} bytes; at least 2 "
            "are needed (one is padding): raise the memory fraction or lower the page size"
        )
    pages = {group.pool: num_pages for group in spec.groups}
    return Capacity(MappingProxyType(pages), num_rows, max_context_len)
