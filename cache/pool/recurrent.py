"""Store recurrent states, one tensor per part for all layers.

Layout: [layers, num_pages, *shape] for every part of a layer's state. A page is the whole state of
a session at one length; page 0 is padding. States are fp32 for every dtype of the model: a state
accumulates all tokens, so a rounding error at one token affects all that follow.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from cache.pool.storage import zeros
from cache.spec import LayerGroup, LayerKind
from cache.types import PoolName


class StatePool:
    """Hold the device memory of one `LayerGroup` of kind RECURRENT.

    A page keeps its contents when it changes hands: a row that starts a session uses zeros instead
    of reading its page. `page_axis`: the dimension of each part that counts pages.
    """

    page_axis: Final = 1

    def __init__(self, group: LayerGroup, *, num_pages: int, device: torch.device) -> None:
        """Allocate the pages.

        Raises:
            torch.OutOfMemoryError: the device has less memory than the pool needs.
        """
        assert group.kind is LayerKind.RECURRENT, "this pool stores states only"
        assert group.dtype_bytes == torch.float32.itemsize, "states are fp32"
        self.name: PoolName = group.pool
        self.storage = tuple(
            zeros((len(group.layers), num_pages, *shape), dtype=torch.float32, device=device)
            for shape in group.state_shapes
        )
        self.parts: tuple[tuple[Tensor, ...], ...] = tuple(
            zip(*(part.unbind(0) for part in self.storage), strict=True)
        )
        """By layer, its parts: each [num_pages, *shape]."""
        self.num_pages = num_pages
        self.device = self.storage[0].device
        self.num_bytes = sum(part.nbytes for part in self.storage)

    def page(self, page: int) -> tuple[Tensor, ...]:
        """Return views of one state: its parts, each [layers, *shape]."""
        return tuple(part[:, page] for part in self.storage)
