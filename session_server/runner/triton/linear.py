"""Keep the codes of linears as codes on a GPU, and multiply by them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from session_server.attention.triton import launching
from session_server.models.layers.block_weight import BLOCK, BlockWeight, Weight
from session_server.models.layers.linear import Linear, make_linear
from session_server.runner.triton.integer_linear import IntegerLinear, integer_linear
from session_server.runner.triton.linear_kernels import multiply_codes, sum_splits
from session_server.runner.triton.linear_tiles import (
    SUMMED_OUTPUTS,
    LinearTile,
    apply_by_tiles,
    are_multiples,
    compile_tiles,
    least_alike,
)
from session_server.runner.triton.packing import (
    BLOCK_K,
    PackedCodes,
    are_integers,
    has_kernel,
    pack,
)


def tile_shapes(dtype: torch.dtype) -> tuple[LinearTile, ...]:
    """Return the shapes of tiles for activations of a dtype, those of the fewest rows first.

    Products of float32 are no matrix instructions: their operands are in registers. The interpreter
    takes the tiles of halves, which are larger, and what is served.
    """
    if dtype == torch.float32 and not launching.IS_INTERPRETED:
        return (LinearTile(16, 32, 4, 2),)
    return (
        LinearTile(16, 64, 4, 4),
        LinearTile(32, 64, 4, 4),
        LinearTile(64, 128, 4, 3),
        LinearTile(128, 128, 8, 3),
    )


@dataclass(frozen=True, slots=True)
class TritonLinear:
    """Apply a linear whose weight is codes. `bias`: [outputs], in the dtype of activations."""

    codes: PackedCodes
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the map to each row of `x` [..., inputs]; the result is of its dtype.

        A row's result depends on how many rows there are, by the order of sums; of up to 16 rows it
        is the same.
        """
        codes = self.codes
        size, num_blocks = (codes.num_outputs, codes.num_inputs), codes.width // BLOCK_K
        return apply_by_tiles(self._launch, x, size, tile_shapes(x.dtype), num_blocks=num_blocks)

    def compile_all(self, dtype: torch.dtype) -> None:
        """Compile what calls with activations of `dtype` may launch, by launching it on the least
        weight of the same kind."""
        codes = self.codes
        num_outputs, num_inputs = least_alike(codes.num_outputs, codes.num_inputs)
        groups = codes.scales.new_zeros((2 * BLOCK_K // BLOCK, num_outputs))
        least = replace(
            codes,
            codes=torch.zeros_like(codes.codes[:1, :BLOCK_K]).expand(num_outputs, -1).contiguous(),
            scales=groups,
            minimums=None if codes.minimums is None else groups,
            num_inputs=num_inputs,
        )
        x = torch.zeros((1, num_inputs), dtype=dtype, device=codes.codes.device)
        linear = TritonLinear(least, None if self.bias is None else x.new_zeros(num_outputs))
        compile_tiles(linear._launch, x, num_outputs, tile_shapes(dtype))

    def constants(self) -> dict[str, Any]:
        """Return what is compiled into `multiply_codes` for this weight."""
        return {
            "FORMAT": self.codes.format,
            "HAS_BIAS": self.bias is not None,
            "BLOCK_K": BLOCK_K,
        }

    def compiled_for(self) -> tuple[object, ...]:
        """Return what decides what is compiled."""
        sizes = are_multiples(self.codes.num_outputs, self.codes.num_inputs)
        return (*self.constants().values(), *sizes)

    def _launch(self, rows: Tensor, out: Tensor, shape: LinearTile, splits: int) -> None:
        codes, (num_rows, num_outputs) = self.codes, out.shape
        parts = out
        if splits > 1:
            parts = out.new_empty((splits, *out.shape), dtype=torch.float32)
        bias = out if self.bias is None else self.bias
        launching.run(
            multiply_codes,
            (*shape.grid(num_rows, num_outputs), splits),
            rows,
            codes.codes,
            codes.scales,
            codes.scales if codes.minimums is None else codes.minimums,
            bias,
            parts,
            num_rows,
            num_outputs,
            codes.num_inputs,
            codes.width,
            triton.cdiv(codes.width // BLOCK_K, splits),
            **self.constants(),
            IS_SPLIT=splits > 1,
            DOT_DTYPE=launching.dot_dtype(rows.dtype),
            BLOCK_M=shape.num_rows,
            BLOCK_N=shape.num_outputs,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        if splits > 1:
            launching.run(
                sum_splits,
                (num_rows, triton.cdiv(num_outputs, SUMMED_OUTPUTS)),
                parts,
                bias,
                out,
                num_rows,
                num_outputs,
                splits,
                HAS_BIAS=self.bias is not None,
                BLOCK_N=SUMMED_OUTPUTS,
            )


class TritonLinears:
    """Create linears that keep codes as they are stored. A `LinearFactory`.

    Kernels are compiled with the first weight that needs them, none while a model is served.
    """

    def __init__(self) -> None:
        self._compiled: set[tuple[object, ...]] = set()

    def __call__(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Pack `weight` [outputs, inputs] if it is codes, else leave it to torch."""
        if isinstance(weight, Tensor) or not has_kernel(weight, weight.codes.device):
            return make_linear(weight, bias)
        linear: TritonLinear | IntegerLinear
        if isinstance(weight, BlockWeight) and are_integers(weight):
            linear = integer_linear(weight, bias)
        else:
            linear = TritonLinear(pack(weight), bias)
        needed = (weight.dtype, *linear.compiled_for())
        if needed not in self._compiled:
            linear.compile_all(weight.dtype)
            self._compiled.add(needed)
        return linear
