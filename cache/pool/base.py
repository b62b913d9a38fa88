"""What every device pool answers, whatever a layer keeps of the past."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cache.types import PoolName


class DevicePool(Protocol):
    """Tensors of one pool. The page ids in them are the business of `cache.pages`."""

    @property
    def name(self) -> PoolName:
        """The pool this memory belongs to."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages held, the padding page 0 included."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for the pages of all layers."""
        ...


class KvPages(DevicePool, Protocol):
    """A pool of keys and values per position, as attention reads and writes it.

    Slots are page * page_size + offset. K and V may be the same memory.
    """

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Heads of K, and of V, per layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        ...

    @property
    def bytes_per_layer_token(self) -> int:
        """Bytes of one position in one layer."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the pages."""
        ...

    @property
    def read_dtype(self) -> torch.dtype:
        """Element type that attention computes in."""
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
        """Views of consecutive slots, K and V of layer 0 first.

        Each is [1, kv_heads, num_slots, head_dim].
        """
        ...

    def page(self, page: int, num_slots: int) -> tuple[Tensor, ...]:
        """Views of the first slots of one page in every layer, one for each part that has a size of
        its own: [layers, heads, num_slots, elements].
        """
        ...

    def gather(self, layer: int, pages: Tensor, cleared: Tensor | None = None) -> Tensor:
        """A copy of whole pages, with zeros in the slots `cleared` of it.

        It is [2, kv_heads, n * page_size, head_dim] of `read_dtype`, to be read only.
        """
        ...
