"""What every device pool answers, whatever a layer keeps of the past."""

from __future__ import annotations

from typing import Protocol

import torch

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
