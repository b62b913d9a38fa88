"""Hold and dequantize MXFP4 weights (OCP Microscaling Formats 1.0, 2023).

32 numbers of a row share a power of two, stored with a bias of 127 in one byte. Each number is four
bits, two to a byte, the lower half first: a sign, two bits of exponent and one of mantissa.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 32
"""Numbers that share a scale."""

SCALE_BIAS: Final = 127

MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three bits after the sign."""


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Hold a matrix [outputs, inputs] as it is stored.

    `blocks`: uint8 [outputs, inputs / 32, 16]. `scales`: uint8 [outputs, inputs / 32]. `dtype`:
    that of a dense copy.
    """

    blocks: Tensor
    scales: Tensor
    dtype: torch.dtype

    def rows(self, reorder: Callable[[Tensor], Tensor]) -> Mxfp4Weight:
        """Return the outputs that `reorder` chooses along the first dimension."""
        return replace(self, blocks=reorder(self.blocks), scales=reorder(self.scales))

    def dense(self) -> Tensor:
        """Return the numbers, in `dtype` [outputs, inputs]."""
        outputs, num_blocks = self.scales.shape
        numbers = self.blocks.new_empty((outputs, num_blocks * BLOCK), dtype=self.dtype)
        if numbers.is_meta:
            return numbers  # the ops below would import torch's compiler
        numbers.view(outputs, num_blocks, BLOCK).copy_(dequantize(self.blocks, self.scales))
        return numbers


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Convert blocks, uint8 [..., 16], and scales, uint8 [...], to float32 [..., 32]."""
    signed = (*MAGNITUDES, *(-value for value in MAGNITUDES))
    table = torch.tensor(signed, dtype=torch.float32, device=blocks.device)
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - SCALE_BIAS
    return torch.ldexp(table[numbers.long()], exponents.unsqueeze(-1))
