"""Make a device the current one: on a GPU kernels and events are launched on that."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current one; of a CPU there is one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
