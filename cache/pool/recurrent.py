"""Recurrent states, one tensor per part for all layers.

Layout: [layers, num_pages, *shape] for every part of a layer's state. A page is the whole state of
a session at one length; page 0 is padding. In fp32 whatever the model's dtype: a state adds up all
tokens, and what is lost to rounding at one of them is lost to all that follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache.pool.storage import zeros
from cache.spec import LayerGroup, LayerKind
from cache.types import PoolName


class StatePool:
    """Device memory of one `LayerGroup` of kind RECURRENT. Implements `DevicePool`.

    A page handed from one holder to the next keeps its contents: who begins a session takes zeros
    instead of reading.
    """

    __slots__ = ("_parts", "name", "parts")

    def __init__(self, group: LayerGroup, *, num_pages: int, device: torch.device) -> None:
        """Allocate the pages.

        Raises:
            torch.OutOfMemoryError: the device has less memory than the pool needs.
        """
        assert group.kind is LayerKind.RECURRENT, "this pool stores states only"
        assert group.dtype_bytes == torch.float32.itemsize, "states are fp32"
        self.name: PoolName = group.pool
        self._parts = tuple(
            zeros((len(group.layers), num_pages, *shape), dtype=torch.float32, device=device)
            for shape in group.state_shapes
        )
        self.parts: tuple[tuple[Tensor, ...], ...] = tuple(
            zip(*(part.unbind(0) for part in self._parts), strict=True)
        )
        """By layer, its parts: each [num_pages, *shape]."""

    @property
    def num_pages(self) -> int:
        """Pages held, the padding page 0 included."""
        return self._parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self._parts[0].device

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for the pages of all layers."""
        return sum(part.nbytes for part in self._parts)

    def page(self, page: int) -> tuple[Tensor, ...]:
        """Views of one state: its parts, each [layers, *shape]."""
        return tuple(part[:, page] for part in self._parts)
