"""Dequantize FP8 weights with a scale per block (DeepSeek-AI 2024, V3 report, section 3.3).

A weight `W` of 8-bit floats (E4M3) comes with `W_scale_inv`: a factor for every block of 128 by 128
numbers. The last blocks of a row or column are cut off where the weight ends.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

BLOCK: Final = 128
"""Rows, and columns, that share a scale."""

STORED_DTYPE: Final = "F8_E4M3"
"""The name of this dtype in safetensors headers."""

SCALES_SUFFIX: Final = "_scale_inv"


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight [..., outputs, inputs]."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def dequantize(weight: Tensor, scales: Tensor) -> Tensor:
    """Convert FP8 [outputs, inputs] with its scales to float32 [outputs, inputs]."""
    outputs, inputs = weight.shape
    by_row = scales.float().repeat_interleave(BLOCK, dim=0)[:outputs]
    factors = by_row.repeat_interleave(BLOCK, dim=1)[:, :inputs]
    return weight.float().mul_(factors)
