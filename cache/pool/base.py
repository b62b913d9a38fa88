"""Define what device pools have in common."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cache.types import PoolName


class DevicePool(Protocol):
    """Hold the tensors of one pool. Page ids are managed by `cache.pages`."""

    @property
    def name(self) -> PoolName:
        """Return the name of the pool."""
        ...

    @property
    def num_pages(self) -> int:
        """Return the number of pages, padding page 0 included."""
        ...

    @property
    def device(self) -> torch.device:
        """Return the device that holds the pages."""
        ...

    @property
    def num_bytes(self) -> int:
        """Return the bytes allocated for the pages of all layers."""
        ...


class KvPages(DevicePool, Protocol):
    """Hold keys and values per position, as attention reads and writes them.

    A slot is page * page_size + offset. K and V may be the same memory.
    """

    @property
    def page_size(self) -> int:
        """Return the positions per page."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Return the heads of K, and of V, per layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Return the elements of one head."""
        ...

    @property
    def bytes_per_layer_token(self) -> int:
        """Return the bytes of one position in one layer."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that KV is stored in."""
        ...

    @property
    def read_dtype(self) -> torch.dtype:
        """Return the dtype that attention computes in."""
        ...

    def write(self, layer: int, slot_mapping: Tensor, kv: Tensor) -> None:
        """Write new K and V to slots of one layer, cast to the pages' dtype.

        Args:
            layer: index within the pool.
            slot_mapping: int64 [tokens], the slot of each token.
            kv: [tokens, 2 * kv_heads, head_dim], K before V.
        """
        ...

    def run(self, first_slot: int, num_slots: int) -> tuple[Tensor, ...]:
        """Return views of consecutive slots, K and V of layer 0 first.

        Each is [1, kv_heads, num_slots, head_dim].
        """
        ...

    def page(self, page: int, num_slots: int) -> tuple[Tensor, ...]:
        """Return views of the first slots of one page in every layer.

        There is one view per part with a size of its own: [layers, heads, num_slots, elements].
        """
        ...

    def gather(self, layer: int, pages: Tensor, cleared: Tensor | None = None) -> Tensor:
        """Return a copy of whole pages, with zeros in the slots `cleared` of it.

        It is [2, kv_heads, n * page_size, head_dim] of `read_dtype`, and must not be written.
        """
        ...
