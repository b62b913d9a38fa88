"""Attention and recurrent states on GPUs, by kernels in Triton."""

from __future__ import annotations

import importlib.util

import torch


def why_not(device: torch.device) -> str | None:
    """Return why the kernels cannot run on a device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'session-server[gpu]'"
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        return f"it runs on GPUs, not on {device}; TRITON_INTERPRET=1 interprets it, very slowly"
    return None


def has_e4m3(device: torch.device) -> bool:
    """Return whether kernels on a device convert 8-bit floats of 3 bits of mantissa."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
