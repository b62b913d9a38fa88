"""Lay codes out as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from session_server.attention.triton import has_e4m3
from session_server.models.layers.block_weight import (
    BLOCK,
    BlockWeight,
    CodedWeight,
    Fp8Weight,
)

BLOCK_K: Final = 64
"""Bytes of a row of codes that a program reads at a time; rows are padded to whole ones."""

MAX_SUMMED: Final = (2**31 - 1) // (128 * 127)
"""Products of integers that a sum of 32 bits holds whatever they are."""

CodeFormat = Literal["int4", "int4 without minimums", "int8", "fp8"]
"""What codes say, as kernels are compiled for it."""


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Hold a weight [num_outputs, num_inputs]; `times_codes` describes the layout.

    `codes`: uint8, or 8-bit floats, [num_outputs, width]. `scales` and, if there are any,
    `minimums`: [groups, num_outputs]; float16, of 8-bit floats float32.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    num_inputs: int
    format: CodeFormat

    @property
    def num_outputs(self) -> int:
        """Return the outputs."""
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        """Return the bytes of an output's codes."""
        return self.codes.shape[1]


def has_kernel(weight: CodedWeight, device: torch.device) -> bool:
    """Return whether the device has what converts the codes; else torch computes with numbers."""
    return not isinstance(weight, Fp8Weight) or has_e4m3(device)


def pack(weight: CodedWeight) -> PackedCodes:
    """Copy codes into the kernels' layout."""
    if isinstance(weight, BlockWeight):
        return _pack_blocks(weight)
    assert isinstance(weight, Fp8Weight)
    codes = functional.pad(weight.codes, (0, _width(weight.shape[1], 8) - weight.shape[1]))
    scales = weight.scales.t().contiguous()
    codes = codes.view(torch.float8_e4m3fn)
    return PackedCodes(codes, scales, None, weight.shape[1], "fp8")


def _pack_blocks(weight: BlockWeight) -> PackedCodes:
    """Copy integers; their scales and minimums are rounded to 16 bits."""
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
    scales = by_group(weight.scales)
    of_4_bits: CodeFormat = "int4 without minimums" if minimums is None else "int4"
    kind: CodeFormat = of_4_bits if weight.num_bits == 4 else "int8"
    return PackedCodes(codes, scales, minimums, num_inputs, kind)


def are_integers(weight: BlockWeight) -> bool:
    """Return whether inputs are rounded too, and sums of products of integers fit into 32 bits."""
    return weight.rounds_inputs and weight.shape[1] <= MAX_SUMMED


def packed_bytes(weight: CodedWeight) -> int:
    """Return the bytes of a weight as the kernels hold it."""
    outputs, inputs = weight.shape
    if not isinstance(weight, BlockWeight):
        return outputs * _width(inputs, 8) + weight.scales.nbytes
    if are_integers(weight):
        return outputs * (inputs + torch.float32.itemsize)
    width = _width(inputs, weight.num_bits)
    num_groups = width * 8 // weight.num_bits // BLOCK
    num_sides = 1 if weight.minimums is None else 2
    return outputs * (width + num_groups * torch.float16.itemsize * num_sides)


def _width(inputs: int, num_bits: int) -> int:
    """Return the bytes of a row of codes."""
    return -(-inputs * num_bits // 8 // BLOCK_K) * BLOCK_K
