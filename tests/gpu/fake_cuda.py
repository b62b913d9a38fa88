"""A GPU that is not there: it counts what would wait for it, and is late where a GPU is.

Tensors "on the device" are tensors of the CPU that say so. What is launched is computed at once,
but what is copied to the host arrives when an event behind the copy is over: until then the
host's memory holds what nobody could take for a result. Pinned memory that a copy reads must stay
as it is for as long.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from session_server.attention.triton import launching

CUDA = torch.device("cuda", 0)

_READS = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero",
    "unique", "masked_select", "equal", "is_nonzero", "cpu", "argwhere", "bincount",
}  # fmt: skip
"""What gives the host a value of the device, or a shape that depends on one."""


class OnDevice(Tensor):
    """A tensor that says it is on the device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


class Pinned(Tensor):
    """A tensor of the host in pinned memory."""


class PinnedChangedError(Exception):
    """Tell of pinned memory that was written while a copy read it."""


class FakeCuda(TorchFunctionMode):
    """Stand for the device while it is entered. `waits`: what waited for it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.num_copies_in = 0
        self._launched: deque[Callable[[], None] | FakeEvent] = deque()

    def advance(self, until: FakeEvent | None = None) -> None:
        """Have the device do what was launched: all, or what comes before an event."""
        while self._launched and (until is None or not until.is_over):
            match self._launched.popleft():
                case FakeEvent() as event:
                    event.is_over = True
                case arrive:
                    arrive()

    def record(self, event: FakeEvent) -> None:
        """Put an event behind what was launched."""
        self._launched.append(event)

    def on_device(self, value: Any) -> Any:
        """Return a tensor of the CPU as one of the device."""
        return value.as_subclass(OnDevice) if isinstance(value, Tensor) else value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        if name in ("to", "copy_", "pin_memory"):
            return getattr(self, f"_{name}")(*args, **kwargs)
        found: list[Tensor] = []
        tree_map(lambda value: found.append(value) if isinstance(value, Tensor) else None, args)
        tree_map(lambda value: found.append(value) if isinstance(value, Tensor) else None, kwargs)
        is_there = any(isinstance(value, OnDevice) for value in found)
        if is_there and name in _READS:
            self.waits[name] += 1
        if is_there and name in ("__getitem__", "__setitem__"):
            self._check_index(args[1])
        if (
            is_there
            and any(not isinstance(value, OnDevice) and value.dim() for value in found)
            and name not in ("__getitem__", "__setitem__")
        ):
            raise RuntimeError(f"{name} of tensors on two devices")
        if (device := kwargs.get("device")) is not None:
            is_there = torch.device(device).type == "cuda"
            kwargs["device"] = "cpu"
            if is_there and name in ("tensor", "as_tensor") and args[0]:
                self.waits[f"{name} of values of the host"] += 1
        is_pinned = kwargs.pop("pin_memory", False)
        out = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        if is_pinned:
            return out.as_subclass(Pinned)
        return (
            tree_map(self.on_device, out) if is_there and name not in _READS - {"nonzero"} else out
        )

    def _check_index(self, index: Any) -> None:
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, list) or (
                isinstance(each, Tensor) and not isinstance(each, OnDevice)
            ):
                self.waits["an index of the host"] += 1
            elif isinstance(each, Tensor) and each.dtype == torch.bool:
                self.waits["an index of booleans"] += 1

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.pop("device", None)
        rest = []
        for each in args:
            if isinstance(each, torch.device) or (isinstance(each, str) and device is None):
                device = torch.device(each)
            elif isinstance(each, Tensor):
                device = each.device
                rest.append(each.dtype)
            else:
                rest.append(each)
        was_there = isinstance(tensor, OnDevice)
        goes_there = was_there if device is None else torch.device(device).type == "cuda"
        is_async = kwargs.pop("non_blocking", False)
        if goes_there and not was_there:
            self._copied_in(tensor, is_async=is_async)
        if was_there and not goes_there:
            self.waits["a copy to the host"] += 1
        plain = _plain(tensor)
        moved = plain.clone() if goes_there != was_there else plain
        out = moved.to(*tree_map(_plain, rest), **kwargs) if rest or kwargs else moved
        return self.on_device(out) if goes_there else out

    def _copy_(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        from_there, there = isinstance(source, OnDevice), isinstance(to, OnDevice)
        if there and not from_there and source.dim():
            self._copied_in(source, is_async=non_blocking)
        if there or not from_there:
            _plain(to).copy_(_plain(source))
            return to
        if not (non_blocking and isinstance(to, Pinned)):
            self.waits["a copy to the host"] += 1
            _plain(to).copy_(_plain(source))
            return to
        value = _plain(source).clone()
        _plain(to).fill_(-77)
        self._launched.append(lambda: _arrive(to, value))
        return to

    def _pin_memory(self, tensor: Tensor) -> Tensor:
        assert not isinstance(tensor, OnDevice), "it is on the device"
        return _plain(tensor).clone().as_subclass(Pinned)

    def _copied_in(self, source: Tensor, *, is_async: bool) -> None:
        self.num_copies_in += 1
        if not isinstance(source, Pinned) or not is_async:
            self.waits["a copy from pageable memory"] += bool(source.numel())
            return
        before = _plain(source).clone()

        def check() -> None:
            if not torch.equal(before, _plain(source)):
                raise PinnedChangedError

        self._launched.append(check)


class FakeEvent:
    """Stand for `torch.cuda.Event`."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.is_over = False

    def record(self) -> None:
        self._device.record(self)

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self._device.advance(self)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.is_over
        assert other.is_over
        return 1.0


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Have torch find a device."""
    device, launch = FakeCuda(), launching.run

    def run(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch(kernel, grid, *map(_plain, args), **constants)

    with pytest.MonkeyPatch.context() as patch, device:
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: FakeEvent(device))
        patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        patch.setattr(launching, "run", run)
        patch.setattr(launching, "num_sms", lambda _: launching.INTERPRETED_NUM_SMS)
        yield device


@torch.inference_mode()
def _arrive(to: Tensor, value: Tensor) -> None:
    _plain(to).copy_(value)


def _plain(value: Any) -> Any:
    """Return a tensor as torch has it."""
    if isinstance(value, OnDevice | Pinned):
        with torch._C.DisableTorchFunction():
            return value.as_subclass(Tensor)
    return value
