"""Return freed host memory to the system while weights are loaded.

Loading copies every tensor, often a second time into another layout. glibc keeps freed blocks below
a threshold for reuse, and raises the threshold to the size of every larger block that is freed, up
to 32 MiB: in the end it would retain half the size of the weights in holes.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3

LOADING_THRESHOLD: Final = 1 << 17
"""Bytes from which a block is mapped by itself, and unmapped when it is freed; glibc's own value at
the start of a process."""

SERVING_THRESHOLD: Final = 1 << 25
"""The same after loading, glibc's maximum: memory of intermediate results is reused from step to
step, because new pages from the system would cost more than computing them."""


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Return freed memory at once inside this context. No effect without glibc.

    Afterwards the thresholds are those that glibc itself reaches once large blocks were freed.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LOADING_THRESHOLD)
    libc.mallopt(M_TRIM_THRESHOLD, LOADING_THRESHOLD)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, SERVING_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * SERVING_THRESHOLD)
        libc.malloc_trim(0)
