"""Measure the weights of a decoder as they are held in memory, without reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from session_server.models.config import MoeConfig
from session_server.models.layers.block_weight import (
    BLOCK,
    FP8_BLOCK,
    BlockWeight,
    Fp8Weight,
    Weight,
)
from session_server.models.layers.linear import Linear, PlainLinear, is_packed
from session_server.models.layers.moe import Experts
from session_server.runner.checkpoint import ExpectedTensors, Shape
from session_server.runner.layer_factories import ExpertMatrices, SeveralKindsError
from session_server.runner.native import WeightFormat
from session_server.runner.triton import packing

_PANEL: Final = 16
"""Outputs that lie side by side, `kPanel` of the kernels."""

_ELEMENT_BITS: Final[dict[WeightFormat, int]] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "int8": 8,
    "int4": 4,
}
_BITS_BESIDE: Final[dict[WeightFormat, int]] = {"int8": 16, "int4": 32}
"""Of each block: a scale, and a minimum."""

CodeBits = Callable[[str, Shape], int]
"""Return the bits of a matrix's codes, 4 with minimums or 8; 0 if it comes as numbers."""


IsFp8 = Callable[[str], bool]
"""Return whether a matrix is stored in 8-bit floats."""


def no_fp8(name: str) -> bool:
    """Say of every matrix that it is not. An `IsFp8`."""
    del name
    return False


def no_codes(name: str, shape: Shape) -> int:
    """Say of every matrix that it comes as numbers. A `CodeBits`."""
    del name, shape
    return 0


HeldBytes = Callable[[Weight], int | None]
"""Return the bytes that kernels of our own hold of a weight; None if torch computes with it."""


class StoredCodes(NamedTuple):
    """Say what of a checkpoint comes as codes: `bits` and `is_fp8` of which matrices.

    `names`: the tensors that exist, if experts in MXFP4 are kept as they are. `rounds_inputs`:
    matrices of 8 bits round their inputs, see `BlockWeight`.
    """

    bits: CodeBits = no_codes
    is_fp8: IsFp8 = no_fp8
    names: Iterable[str] = ()
    rounds_inputs: bool = False


def held_by_torch(weight: Weight) -> int | None:
    """Say of every weight that torch computes with it. A `HeldBytes`."""
    del weight
    return None


def held_by_triton(device: torch.device) -> HeldBytes:
    """Return the `HeldBytes` of the kernels for a GPU: those of codes; torch has the rest."""

    def held(weight: Weight) -> int | None:
        if isinstance(weight, Tensor) or not packing.has_kernel(weight, device):
            return None
        return packing.packed_bytes(weight)

    return held


def held_natively(dense: WeightFormat) -> HeldBytes:
    """Return the `HeldBytes` of the native kernels, which hold dense weights in a format."""

    def held(weight: Weight) -> int:
        outputs, inputs = weight.shape
        if not isinstance(weight, BlockWeight):
            return packed_bytes(outputs, inputs, dense)
        return packed_bytes(outputs, inputs, "int4" if weight.num_bits == 4 else "int8")

    return held


def packed_bytes(outputs: int, inputs: int, weights: WeightFormat) -> int:
    """Return the bytes of a matrix in the layout of the kernels, without its bias.

    Outputs are padded to whole panels, inputs to whole blocks of codes, or to pairs.
    """
    beside = _BITS_BESIDE.get(weights, 0)
    unit = BLOCK if beside else 2
    num_units = -(-outputs // _PANEL) * _PANEL * -(-inputs // unit)
    return num_units * (unit * _ELEMENT_BITS[weights] + beside) // 8


class MeasuredTensors(ExpectedTensors):
    """Return weights without content, codes among them, and count what linears make of them."""

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        held_bytes: HeldBytes,
        stored: StoredCodes,
    ) -> None:
        """Create a source; see `weights.weight_bytes`."""
        super().__init__(stored.names, dtype)
        self._device = device
        self._held_bytes = held_bytes
        self._stored = stored
        self._num_linear_bytes = 0
        self._embedding: Tensor | None = None

    @property
    def num_held_bytes(self) -> int:
        """Return the bytes of all that was taken, matrices of linears as these hold them."""
        return self.num_bytes + self._num_linear_bytes

    def take_as(self, dtype: torch.dtype, name: str, *shape: int) -> Tensor:
        """Record a tensor; the first of a decoder is its embedding."""
        tensor = super().take_as(dtype, name, *shape)
        if self._embedding is None:
            self._embedding = tensor
        return tensor

    def take_linear(self, name: str, outputs: int, inputs: int) -> Weight:
        """Record a matrix [outputs, inputs]."""
        dense = self.take(name, outputs, inputs)
        if self._stored.is_fp8(name):
            codes = torch.empty((outputs, inputs), dtype=torch.uint8, device="meta")
            scales = torch.empty((outputs, -(-inputs // FP8_BLOCK)), device="meta")
            return Fp8Weight(codes, scales, self.dtype)
        num_bits = self._stored.bits(name, (outputs, inputs))
        if num_bits == 0:
            return dense
        kind = torch.uint8 if num_bits == 4 else torch.int8
        codes = torch.empty((outputs, inputs), dtype=kind, device="meta")
        scales = torch.empty((outputs, inputs // BLOCK), device="meta")
        minimums = scales if num_bits == 4 else None
        rounds_inputs = self._stored.rounds_inputs and num_bits == 8
        return BlockWeight(codes, scales, minimums, num_bits, self.dtype, rounds_inputs)

    def has_codes(self, name: str) -> bool:
        """Return whether a matrix that was taken comes as codes."""
        return self._stored.bits(name, self.shapes[name]) != 0

    def experts(self, moe: MoeConfig, experts: Iterable[ExpertMatrices]) -> Experts:
        """Count the matrices of experts, as linears of their own or parts of a stack: both hold the
        same. Those that differ are taken back: they will come again."""
        before = self.num_bytes, self._num_linear_bytes
        try:
            return super().experts(moe, experts)
        except SeveralKindsError:
            self.num_bytes, self._num_linear_bytes = before
            raise

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Count the matrix as a linear holds it, in place of the numbers that were taken for it."""
        outputs, inputs = weight.shape
        num_dense = outputs * inputs * self.dtype.itemsize
        is_shared = weight is self._embedding  # it is read by rows too
        num_held = self._held_bytes(weight)
        if num_held is None:
            is_copied = is_packed(outputs * inputs, self.dtype, self._device)
            num_held = 0 if is_shared and not is_copied else num_dense
        self._num_linear_bytes += num_held - (0 if is_shared else num_dense)
        return PlainLinear(weight if isinstance(weight, Tensor) else weight.dense(), bias)
