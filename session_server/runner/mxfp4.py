"""Dequantize MXFP4 weights (OCP Microscaling Formats 1.0, 2023) to the model's dtype.

32 numbers of a row share a power of two, stored with a bias of 127 in one byte. Each number is four
bits, two to a byte, the lower half first: a sign, two bits of exponent and one of mantissa.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from session_server.runner.checkpoint import WeightSource

BLOCK: Final = 32
"""Numbers that share a scale."""

SCALE_BIAS: Final = 127

MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three bits after the sign."""


def take_mxfp4(tensors: WeightSource, name: str, shape: tuple[int, int, int]) -> Tensor:
    """Load `NAME_blocks` and `NAME_scales`.

    `shape`: [experts, outputs, inputs] of the result; inputs are whole blocks.
    """
    num_experts, outputs, inputs = shape
    num_blocks = inputs // BLOCK
    blocks = tensors.take_as(
        torch.uint8, f"{name}_blocks", num_experts, outputs, num_blocks, BLOCK // 2
    )
    scales = tensors.take_as(torch.uint8, f"{name}_scales", num_experts, outputs, num_blocks)
    weights = torch.empty(shape, dtype=tensors.dtype, device=blocks.device)
    if weights.is_meta:
        return weights  # the ops below would import torch's compiler
    # One expert at a time: intermediate tensors take several times the memory of the result.
    for expert in range(num_experts):
        weights[expert] = dequantize(blocks[expert], scales[expert]).view(outputs, inputs)
    return weights


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Convert blocks, uint8 [..., 16], and scales, uint8 [...], to float32 [..., 32]."""
    signed = (*MAGNITUDES, *(-value for value in MAGNITUDES))
    table = torch.tensor(signed, dtype=torch.float32, device=blocks.device)
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - SCALE_BIAS
    return torch.ldexp(table[numbers.long()], exponents.unsqueeze(-1))
