"""Where the bytes of a pool come from."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
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
    return torch.from_numpy(_small_pages(num_bytes)).view(dtype).view(tuple(shape))


def _small_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that the operating system hands out in its smallest pages.

    numpy asks for huge pages, of which every session would touch one per layer and head with its
    first token: 2 GiB for 64 sessions of a tiny model, and seconds of clearing (docs/log.md).
    """
    if sys.platform != "linux" or num_bytes == 0:
        return np.zeros(num_bytes, np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages does not know the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)
