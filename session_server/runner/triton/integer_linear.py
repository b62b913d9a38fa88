"""Multiply rows that are rounded to 8 bits by codes of 8 bits, as integers: W8A8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from session_server.attention.triton import launching
from session_server.models.layers.block_weight import BlockWeight
from session_server.runner.triton.integer_kernels import (
    multiply_integers,
    round_rows,
    sum_integers,
)
from session_server.runner.triton.linear_tiles import (
    SUMMED_OUTPUTS,
    LinearTile,
    apply_by_tiles,
    are_multiples,
    compile_tiles,
    least_alike,
)

BLOCK_K: Final = 128
"""Inputs of a row that a program multiplies at a time."""

ROUNDED_INPUTS: Final = 8192
"""Inputs of a row that are rounded at a time: all that most layers have."""

ROUNDING_WARPS: Final = 8

SHAPES: Final = (
    LinearTile(16, 64, 4, 4),
    LinearTile(32, 64, 4, 4),
    LinearTile(64, 128, 4, 3),
    LinearTile(128, 128, 8, 3),
)
"""Shapes of tiles, those of the fewest rows first."""


@dataclass(frozen=True, slots=True)
class IntegerLinear:
    """Apply a linear whose inputs and weight are 8-bit codes.

    `codes`: int8 [outputs, inputs]. `scales`: float32 [outputs]. `bias`: [outputs], in the dtype of
    activations.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the map to each row of `x` [..., inputs]; the result is of its dtype.

        Other rows change nothing of a row's result.
        """
        num_outputs, num_inputs = self.codes.shape
        num_blocks = triton.cdiv(num_inputs, BLOCK_K)
        size = num_outputs, num_inputs
        return apply_by_tiles(self._launch, x, size, SHAPES, num_blocks=num_blocks)

    def compile_all(self, dtype: torch.dtype) -> None:
        """Compile what calls with activations of `dtype` may launch, by launching it on the least
        weight of the same kind."""
        num_outputs, num_inputs = least_alike(*self.codes.shape)
        codes = self.codes.new_zeros((num_outputs, num_inputs))
        x = torch.zeros((1, num_inputs), dtype=dtype, device=codes.device)
        bias = None if self.bias is None else x.new_zeros(num_outputs)
        linear = IntegerLinear(codes, self.scales.new_zeros(num_outputs), bias)
        compile_tiles(linear._launch, x, num_outputs, SHAPES)

    def compiled_for(self) -> tuple[object, ...]:
        """Return what decides what is compiled."""
        return IntegerLinear, self.bias is None, *are_multiples(*self.codes.shape)

    def _launch(self, rows: Tensor, out: Tensor, shape: LinearTile, splits: int) -> None:
        (num_rows, num_outputs), num_inputs = out.shape, rows.shape[1]
        rounded, row_scales = rounded_rows(rows)
        parts = out
        if splits > 1:
            parts = out.new_empty((splits, *out.shape), dtype=torch.int32)
        bias = out if self.bias is None else self.bias
        launching.run(
            multiply_integers,
            (*shape.grid(num_rows, num_outputs), splits),
            rounded,
            row_scales,
            self.codes,
            self.scales,
            bias,
            parts,
            num_rows,
            num_outputs,
            num_inputs,
            triton.cdiv(triton.cdiv(num_inputs, BLOCK_K), splits),
            HAS_BIAS=self.bias is not None,
            IS_SPLIT=splits > 1,
            BLOCK_M=shape.num_rows,
            BLOCK_N=shape.num_outputs,
            BLOCK_K=BLOCK_K,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        if splits > 1:
            launching.run(
                sum_integers,
                (num_rows, triton.cdiv(num_outputs, SUMMED_OUTPUTS)),
                parts,
                row_scales,
                self.scales,
                bias,
                out,
                num_rows,
                num_outputs,
                splits,
                HAS_BIAS=self.bias is not None,
                BLOCK_N=SUMMED_OUTPUTS,
            )


def rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [rows, inputs], contiguous, to int8 codes of that shape; with their scales,
    float32 [rows]."""
    codes = rows.new_empty(rows.shape, dtype=torch.int8)
    scales = rows.new_empty(len(rows), dtype=torch.float32)
    launching.run(
        round_rows,
        (len(rows),),
        rows,
        codes,
        scales,
        rows.shape[1],
        BLOCK_K=ROUNDED_INPUTS,
        num_warps=ROUNDING_WARPS,
    )
    return codes, scales


def integer_linear(weight: BlockWeight, bias: Tensor | None) -> IntegerLinear:
    """Return the linear of a weight that rounds its inputs; its codes are kept, not copied."""
    assert weight.rounds_inputs
    return IntegerLinear(weight.codes.contiguous(), weight.scales[:, 0].contiguous(), bias)
