"""Memory of the host that is freed goes back to the system while weights are loaded.

Loading makes a copy of every tensor, and often a second one in another layout. glibc keeps freed
blocks below a threshold for reuse, and raises the threshold to the size of every larger one that is
freed, up to 32 MiB: by the end half the size of the weights again is kept in holes between them.
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
"""Bytes of a block from which on it is mapped by itself, and unmapped when it is freed; glibc's own
at the start of a process."""

SERVING_THRESHOLD: Final = 1 << 25
"""The same afterwards, the most glibc allows: a forward's intermediate results are reused from step
to step, where pages taken from the system anew would cost more than computing them."""


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Within, what is freed is given back at once. No effect without glibc.

    Afterwards the thresholds are those that glibc reaches by itself once large blocks were freed.
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
