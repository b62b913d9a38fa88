"""Where the bytes of a pool come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor of zeros.

    On a CPU the memory is the operating system's zero pages until it is written: a pool sized for
    the busiest hour costs at start neither the time to clear it nor the memory.

    Raises:
        torch.OutOfMemoryError, MemoryError: the device has less.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(tuple(shape))
