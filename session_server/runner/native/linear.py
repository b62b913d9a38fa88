"""Keep the weights of linears in the layout that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from session_server.models.layers.block_weight import BlockWeight, Weight
from session_server.models.layers.linear import Linear, PackedLinear, PlainLinear
from session_server.runner.native import WeightFormat, _native
from session_server.runner.weight_rows import as_dense

FORMATS: Final[dict[torch.dtype, WeightFormat]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """Apply a linear by the kernels."""

    packed: _native.Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the map to each row of `x`; the result is float32 on the CPU."""
        y = torch.empty((*x.shape[:-1], self.packed.outputs), dtype=torch.float32)
        self.packed.apply(x.float().contiguous().numpy(), y.numpy())
        return y


@dataclass(frozen=True, slots=True)
class NativeLinears:
    """Create linears that keep weights in one format. A `LinearFactory`."""

    format: WeightFormat

    def __call__(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Pack `weight` [outputs, inputs] with `bias` [outputs]; codes stay the codes they are."""
        if isinstance(weight, BlockWeight):
            return NativeLinear(pack_codes(weight, bias))
        return NativeLinear(pack(as_dense(weight), self.format, bias))


def pack(weight: Tensor, format: WeightFormat, bias: Tensor | None = None) -> _native.Linear:
    """Copy a weight [outputs, inputs] into the kernels' layout, quantizing it if so asked."""
    of_bias = None if bias is None else bias.float().contiguous().numpy()
    return _native.Linear(weight.detach().contiguous(), format, of_bias)


def pack_codes(weight: BlockWeight, bias: Tensor | None = None) -> _native.Linear:
    """Copy codes into the kernels' layout; their scales and minimums are rounded to 16 bits."""
    minimums = weight.minimums
    if minimums is None and weight.num_bits == 4:
        minimums = torch.zeros_like(weight.scales)
    return _native.Linear.of_codes(
        weight.codes.contiguous().numpy(),
        weight.num_bits,
        weight.scales.contiguous().numpy(),
        None if minimums is None else minimums.contiguous().numpy(),
        None if bias is None else bias.float().contiguous().numpy(),
    )


def packed(linear: Linear) -> _native.Linear:
    """Return the packed weights of a linear; those of torch's linears are copied."""
    if isinstance(linear, NativeLinear):
        return linear.packed
    assert isinstance(linear, PlainLinear | PackedLinear), "a linear has a weight"
    weight = linear.weight
    return pack(weight, FORMATS[weight.dtype], linear.bias)
