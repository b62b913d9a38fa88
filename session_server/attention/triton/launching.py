"""Launch kernels in Triton: on a GPU, or in Triton's interpreter, which runs them in numpy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

INTERPRETED_NUM_SMS: Final = 8
"""Multiprocessors that are planned for where there are none: enough that work is split."""

IS_INTERPRETED: Final[bool] = bool(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET is set, by which kernels run on the CPU."""

TL_DTYPES: Final = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
"""Triton's names of the dtypes that are computed in."""


def run(kernel: Any, grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """Launch a kernel. All launches come through here, called as `launching.run`."""
    # What is padded may be anything, of which numpy would warn.
    with np.errstate(all="ignore") if IS_INTERPRETED else nullcontext():
        kernel[grid](*args, **constants)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return in which dtype products of numbers in `dtype` are computed; numpy has no halves."""
    return tl.float32 if IS_INTERPRETED else TL_DTYPES[dtype]


def num_sms(device: torch.device) -> int:
    """Return the multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETED_NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
