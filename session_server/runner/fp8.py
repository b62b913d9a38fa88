"""Dequantize FP8 weights with a scale per block (DeepSeek-AI 2024, V3 report, section 3.3).

A weight `W` of 8-bit floats (E4M3) comes with `W_scale_inv`: a factor for every block of 128 by 128
numbers. The last blocks of a row or column are cut off where the weight ends.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from session_server.models.layers.block_weight import FP8_BLOCK as BLOCK

STORED_DTYPE: Final = "F8_E4M3"
"""The name of this dtype in safetensors headers."""

SCALES_SUFFIX: Final = "_scale_inv"

SCALES_DTYPES: Final = frozenset({"F32", "BF16", "F16", "F8_E8M0"})
"""Names of the dtypes that scales may have."""


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight [..., outputs, inputs]."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def dequantize(weight: Tensor, scales: Tensor) -> Tensor:
    """Convert FP8 [outputs, inputs] with its scales to float32 [outputs, inputs]."""
    factors = by_output(scales, len(weight)).repeat_interleave(BLOCK, dim=1)
    return weight.float().mul_(factors[:, : weight.shape[1]])


def by_output(scales: Tensor, num_outputs: int) -> Tensor:
    """Return the scales of blocks as those of single outputs, float32 [num_outputs, blocks]."""
    return scales.float().repeat_interleave(BLOCK, dim=0)[:num_outputs]
