"""Allocate the memory of a pool, and hold what pools of positions share."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.spec import LayerGroup
from cache.types import PoolName


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFormat:
    """Describe the number of pages and their contents.

    `num_pages`: the padding page included. `page_size`: positions per page. `dtype`: of stored
    elements; written values are cast to it. `read_dtype`: of the copies that `gather` makes.
    `device`: where the pages are.
    """

    num_pages: int
    page_size: int
    dtype: torch.dtype
    read_dtype: torch.dtype
    device: torch.device


class KvPool(ABC):
    """Hold keys and values per position, in one tensor for all layers of a `LayerGroup`.

    A slot is page * page_size + offset; page 0 is padding. K and V may be the same memory. Layers
    are counted within the pool. `read_dtype`: the dtype that attention computes in.

    Pages start as zeros, so that padding never reads a NaN. A page keeps its contents when it
    changes hands: readers must stop at their own length. `page_axis`: the dimension of `storage`
    that counts pages.
    """

    page_axis: ClassVar[int]

    def __init__(self, group: LayerGroup, pages: PageFormat, layer_shape: tuple[int, ...]) -> None:
        """Allocate the pages; `layer_shape` is the shape of one layer's tensor.

        Raises:
            torch.OutOfMemoryError: the device has less memory than the pool needs.
        """
        assert pages.dtype.itemsize == group.dtype_bytes, "the spec was made for another dtype"
        num_layers = len(group.layers)
        self.storage = zeros((num_layers, *layer_shape), dtype=pages.dtype, device=pages.device)
        self.device = self.storage.device
        self.num_bytes = self.storage.nbytes
        self.name: PoolName = group.pool
        self.num_pages = pages.num_pages
        self.page_size = pages.page_size
        self.num_kv_heads = group.num_kv_heads
        self.head_dim = group.head_dim
        self.dtype = pages.dtype
        self.read_dtype = pages.read_dtype
        self.bytes_per_layer_token = group.bytes_per_token // num_layers
        num_slots = pages.num_pages * pages.page_size
        assert self.num_bytes == num_slots * group.bytes_per_token, "the spec counts what is kept"

    @abstractmethod
    def write(self, layer: int, slot_mapping: Tensor, kv: Tensor) -> None:
        """Write new K and V to slots of one layer, cast to the pages' dtype.

        `slot_mapping`: int64 [tokens]. `kv`: [tokens, 2 * kv_heads, head_dim], K before V.
        """

    @abstractmethod
    def run(self, first_slot: int, num_slots: int) -> tuple[Tensor, ...]:
        """Return views of consecutive slots: K of layer 0, V of layer 0, K of layer 1, ...

        Each is [1, kv_heads, num_slots, head_dim].
        """

    @abstractmethod
    def page(self, page: int, num_slots: int) -> tuple[Tensor, ...]:
        """Return views of the first slots of one page in every layer.

        There is one view per part with a size of its own: [layers, heads, num_slots, elements].
        """

    @abstractmethod
    def gather(self, layer: int, pages: Tensor, cleared: Tensor | None = None) -> Tensor:
        """Return a copy of whole pages, int64 [n], with zeros in the slots `cleared`, int64 [m].

        It is [2, kv_heads, n * page_size, head_dim] of `read_dtype`, and must not be written.
        """


def movable(stored: Tensor) -> Tensor:
    """Return a view of the same elements in a dtype that torch copies by index: 8-bit floats, for
    which it has few operations, as bytes."""
    return stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored


def cast_to_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in the dtype of a pool. 8-bit floats saturate: what is beyond their range
    would be NaN, or infinite."""
    if values.dtype == dtype:
        return values
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a contiguous tensor of zeros.

    On a CPU the memory is the operating system's zero pages until it is written: a pool sized for
    peak load takes neither time to clear nor memory at start.

    Raises:
        torch.OutOfMemoryError, MemoryError: the device has less memory.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(_small_pages(num_bytes)).view(dtype).view(tuple(shape))


def _small_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros in the smallest pages of the operating system.

    numpy asks for huge pages, of which every session would touch one per layer and head with its
    first token: 2 GiB for 64 sessions of a tiny model, and seconds of clearing (docs/log.md).
    """
    if sys.platform != "linux" or num_bytes == 0:
        return np.zeros(num_bytes, np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages does not know the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)
