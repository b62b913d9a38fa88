"""Copy whole pages between the tensors of a pool and host memory, beside the forwards.

In host memory the pages of one tensor lie as in the tensor, one behind the other along its page
axis, as bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.types import Pages

HostPages = NDArray[np.uint8]
"""Bytes of n pages of one tensor: its shape, with n in place of the number of pages."""

BLOCK_BYTES: Final = 16 << 20
"""Bytes that pass through the memory of a GPU at a time, beside its pools."""

_HUGE_BYTES: Final = 8 << 20


class PagedTensor:
    """Copy pages of one tensor. `page_axis`: the dimension that counts them."""

    def __init__(self, storage: Tensor, page_axis: int) -> None:
        self._bytes = storage.view(torch.uint8)
        self.page_axis = page_axis
        self._is_host = storage.device.type == "cpu"
        # A stream of its own: the copies of a GPU run beside its forwards.
        self._stream = None if self._is_host else torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call]

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page."""
        return self._bytes.numel() // self._bytes.shape[self.page_axis]

    def shape_of(self, num_pages: int) -> tuple[int, ...]:
        """Return the shape of so many pages in host memory."""
        shape = list(self._bytes.shape)
        shape[self.page_axis] = num_pages
        return tuple(shape)

    def copy_out(self, pages: Pages, target: HostPages) -> None:
        """Copy pages, int32 [n], to host memory. Returns when it is there."""
        if self._is_host:
            storage = self._bytes.numpy()
            for at, page, num_pages in runs_of(pages):
                np.copyto(self._part(target, at, num_pages), self._part(storage, page, num_pages))
            return
        host = torch.from_numpy(target)
        with torch.cuda.stream(self._stream):
            for start, block in self._blocks(pages):
                ids = torch.from_numpy(block).to(self._bytes.device)
                host.narrow(self.page_axis, start, len(block)).copy_(
                    self._bytes.index_select(self.page_axis, ids), non_blocking=True
                )
        self._synchronize()

    def copy_in(self, source: HostPages, first: int, pages: Pages) -> None:
        """Copy pages of host memory, from the `first` on, to `pages`, int32 [n]. Returns when they
        are there."""
        if self._is_host:
            storage = self._bytes.numpy()
            for at, page, num_pages in runs_of(pages):
                wanted = self._part(source, first + at, num_pages)
                np.copyto(self._part(storage, page, num_pages), wanted)
            return
        host = torch.from_numpy(source)
        with torch.cuda.stream(self._stream):
            for start, block in self._blocks(pages):
                ids = torch.from_numpy(block).to(self._bytes.device).long()
                block_pages = host.narrow(self.page_axis, first + start, len(block)).contiguous()
                there = block_pages.to(self._bytes.device, non_blocking=True)
                self._bytes.index_copy_(self.page_axis, ids, there)
        self._synchronize()

    def _synchronize(self) -> None:
        assert self._stream is not None, "only a GPU has streams"
        self._stream.synchronize()

    def _part(self, pages: HostPages, first: int, num_pages: int) -> HostPages:
        index = (slice(None),) * self.page_axis + (slice(first, first + num_pages),)
        return pages[index]

    def _blocks(self, pages: Pages) -> Iterator[tuple[int, Pages]]:
        num_pages = max(1, BLOCK_BYTES // self.page_bytes)
        for start in range(0, len(pages), num_pages):
            yield start, np.ascontiguousarray(pages[start : start + num_pages])


def runs_of(pages: Pages) -> Iterator[tuple[int, int, int]]:
    """Yield (index, first page, number of pages) of maximal runs of consecutive page ids."""
    if not len(pages):
        return
    starts = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], len(pages)], strict=True):
        yield start, int(pages[start]), end - start


def host_memory(shapes: Sequence[tuple[int, ...]], *, is_pinned: bool) -> list[HostPages]:
    """Return arrays of these shapes in one block of memory, which goes back to the system with the
    last of them. Their contents are arbitrary.

    `is_pinned`: a GPU copies to it and from it without a detour.

    Raises:
        MemoryError, RuntimeError: the system has no more.
    """
    sizes = [int(np.prod(shape)) for shape in shapes]
    whole = _pinned(sum(sizes)) if is_pinned else _mapped(sum(sizes))
    ends = np.cumsum([0, *sizes]).tolist()
    return [
        whole[start : start + size].reshape(shape)
        for start, size, shape in zip(ends, sizes, shapes, strict=False)
    ]


def _pinned(num_bytes: int) -> NDArray[np.uint8]:
    memory: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _mapped(num_bytes: int) -> NDArray[np.uint8]:
    # An allocator keeps what it is given back, in pieces; a mapping is gone at once. Private ones
    # that lie side by side are one to the kernel, which allows 65,530 to a process.
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from error
    if num_bytes >= _HUGE_BYTES and sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, num_bytes)
