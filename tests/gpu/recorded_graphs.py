"""Graphs that are recorded on the CPU, and held to what a CUDA graph demands.

What a function does to tensors is recorded as it runs, operation by operation, and a replay does
the same to the same memory: what the host has computed is a constant from then on, and whatever was
not copied into place stays as it was. A tensor from before the capture is remembered by its memory,
weakly, as a graph does: one that is gone by the next replay was captured and is no more.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from session_server.attention.triton import launching
from session_server.runner.decode_graphs import Graph

HOST_READS = {
    f"aten::{name}"
    for name in ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "unique")
}
"""Operations whose result, or its shape, the host must wait for."""


class NotCapturableError(Exception):
    """Tell what a CUDA graph could not do, or would do wrong."""


@dataclass(frozen=True)
class Outside:
    """A tensor from before the capture."""

    storage: StorageWeakRef
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Outside:
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(
            storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        )

    def tensor(self) -> Tensor:
        if self.storage.expired():
            raise NotCapturableError("a tensor that was captured is gone")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(storage, self.offset, self.size, self.stride)


Recorded = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any], Any]


class Recorder(TorchDispatchMode):
    """Record operations. `known`: addresses of memory that was there before."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        self.made: set[int] = set()
        self.calls: list[Recorded] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().partition(".")[0]
        if name in HOST_READS:
            raise NotCapturableError(f"the host reads what {name} gives")
        out = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, out)
        return out

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        args, kwargs = tree_map(self._kept, args), tree_map(self._kept, dict(kwargs))
        tree_map(self._note_made, out)
        self.calls.append((func, args, kwargs, tree_map(self._kept, out)))

    def _kept(self, value: Any) -> Any:
        """What a call is replayed with: what was made meanwhile, and where the rest is."""
        if not isinstance(value, Tensor):
            return value
        address = value.untyped_storage().data_ptr()
        if address in self.made or not value.numel():
            return value
        if address not in self.known:
            raise NotCapturableError(f"{tuple(value.shape)} of {value.dtype} come from the host")
        return Outside.of(value)

    def _note_made(self, value: Any) -> None:
        if isinstance(value, Tensor):
            address = value.untyped_storage().data_ptr()
            if address not in self.known:
                self.made.add(address)


class RecordedGraphs:
    """A `GraphApi` on the CPU. Every launch of a kernel comes through `launching.run`, which it
    replaces for as long as it captures."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        run()
        gc.collect()
        known = {
            each.untyped_storage().data_ptr()
            for each in gc.get_objects()
            if isinstance(each, Tensor) and each.layout == torch.strided
        }
        recorder = Recorder(known)
        launch = launching.run

        def noted(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
            recorder.note(launch, (kernel, grid, *args), constants, None)
            with torch.utils._python_dispatch._disable_current_modes():
                launch(kernel, grid, *args, **constants)

        with self._patch.context() as patch:
            patch.setattr(launching, "run", noted)
            with recorder:
                out = run()
        return Graph(lambda: _replay(recorder.calls), out)


def _replay(calls: list[Recorded]) -> None:
    for func, args, kwargs, out in calls:
        again = func(*tree_map(_found, args), **tree_map(_found, dict(kwargs)))
        if isinstance(out, Tensor):
            _put(out, again)
        elif isinstance(out, tuple | list):
            for before, after in zip(out, again, strict=True):
                _put(before, after)


def _found(value: Any) -> Any:
    return value.tensor() if isinstance(value, Outside) else value


def _put(before: Tensor, after: Tensor) -> None:
    """Have the result where the first one was, unless it is there: of a view, or in place."""
    if before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr():
        before.copy_(after)
