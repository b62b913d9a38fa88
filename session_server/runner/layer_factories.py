"""Make layers of weights as they are loaded: what a backend decides of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from session_server.models.config import MoeConfig
from session_server.models.layers.block_weight import Weight
from session_server.models.layers.linear import LinearFactory, make_linear
from session_server.models.layers.mlp import GatedMlp, make_gate
from session_server.models.layers.moe import Experts, SerialExperts
from session_server.runner.mxfp4 import Mxfp4Weight

ExpertWeight = Weight | Mxfp4Weight
"""A matrix [outputs, inputs] of an expert."""

ExpertMatrices = Iterable[tuple[ExpertWeight, Tensor | None]]
"""An expert's weight and bias of gate and up, the gate's rows first, and then those of down. They
are loaded as they are asked for."""


class SeveralKindsError(Exception):
    """The experts of a layer differ in what their matrices are: raised where one is loaded."""


ExpertsFactory = Callable[[MoeConfig, Iterable[ExpertMatrices], LinearFactory], Experts]
"""Create the experts of a layer from the matrices of each."""


def serial_experts(
    moe: MoeConfig, experts: Iterable[ExpertMatrices], linear: LinearFactory
) -> SerialExperts:
    """Make a feed-forward of each expert. An `ExpertsFactory`."""
    gate = make_gate(moe.expert.gate)

    def expert(matrices: ExpertMatrices) -> GatedMlp:
        gate_up, down = (linear(_known(weight), bias) for weight, bias in matrices)
        return GatedMlp(gate_up, down, gate)

    return SerialExperts([expert(matrices) for matrices in experts])


def _known(weight: ExpertWeight) -> Weight:
    """Return what linears are made of."""
    return weight.dense() if isinstance(weight, Mxfp4Weight) else weight


@dataclass(frozen=True, slots=True)
class LayerFactories:
    """Say what linears and experts are made of weights."""

    linear: LinearFactory = make_linear
    experts: ExpertsFactory = serial_experts


BY_TORCH: Final = LayerFactories()
