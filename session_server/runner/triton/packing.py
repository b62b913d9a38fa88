"""Lay codes out as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from session_server.models.layers.block_weight import BLOCK, BlockWeight

BLOCK_K: Final = 64
"""Bytes of a row of codes that a program reads at a time; rows are padded to whole ones."""


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Hold a weight [num_outputs, num_inputs]; `multiply_codes` describes the layout.

    `codes`: uint8 [num_outputs, width]. `scales` and, if there are any, `minimums`: float16, of
    BLOCK inputs each, [width / BLOCK, num_outputs] for 8 bits and twice as many for 4.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    num_inputs: int
    num_bits: int

    @property
    def num_outputs(self) -> int:
        """Return the outputs."""
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        """Return the bytes of an output's codes."""
        return self.codes.shape[1]


def pack(weight: BlockWeight) -> PackedCodes:
    """Copy codes into the kernels' layout; scales and minimums are rounded to 16 bits."""
    num_inputs, width = weight.shape[1], _width(weight.shape[1], weight.num_bits)
    padding = width * 8 // weight.num_bits - num_inputs
    codes = functional.pad(weight.codes, (0, padding))
    if weight.num_bits == 4:
        codes = codes[:, :width] | codes[:, width:] << 4
    else:
        codes = codes.view(torch.uint8) ^ 128

    def by_group(numbers: Tensor) -> Tensor:
        return functional.pad(numbers, (0, padding // BLOCK)).half().t().contiguous()

    minimums = None if weight.minimums is None else by_group(weight.minimums)
    return PackedCodes(codes, by_group(weight.scales), minimums, num_inputs, weight.num_bits)


def packed_bytes(outputs: int, inputs: int, num_bits: int, *, has_minimums: bool) -> int:
    """Return the bytes of codes in this layout."""
    width = _width(inputs, num_bits)
    num_groups = width * 8 // num_bits // BLOCK
    return outputs * (width + num_groups * torch.float16.itemsize * (1 + has_minimums))


def _width(inputs: int, num_bits: int) -> int:
    """Return the bytes of a row of codes."""
    return -(-inputs * num_bits // 8 // BLOCK_K) * BLOCK_K
