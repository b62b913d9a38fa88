"""Attention and recurrent states on GPUs, by kernels in Triton."""

from __future__ import annotations

import importlib.util

import torch

from session_server.attention.devices import is_here


def why_not(device: torch.device) -> str | None:
    """Return why the kernels cannot run on a device; None if they can, or if it is a GPU that is
    not here, which is only planned for."""
    if not is_here(device):
        return None
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'session-server[gpu]'"
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        return f"it runs on GPUs, not on {device}; TRITON_INTERPRET=1 interprets it, very slowly"
    return None


def has_e4m3(device: torch.device) -> bool:
    """Return whether kernels on a device convert 8-bit floats of 3 bits of mantissa. Of a GPU that
    is not here that is assumed."""
    if device.type != "cuda" or not is_here(device):
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)
