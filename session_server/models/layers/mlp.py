"""Run gated feed-forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from session_server.models.config import GateConfig, GateKind
from session_server.models.layers.linear import Linear

Gate = Callable[[Tensor, Tensor], Tensor]
"""Combine (gate, up) to the input of the down projection, each [tokens, intermediate]."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Compute `down(act(gate(x)) * up(x))` (Shazeer 2020) with gate and up fused.

    `gate_up`: [hidden] -> [2 * intermediate], gate before up. `down`: [intermediate] -> [hidden].
    """

    gate_up: Linear
    down: Linear
    gate: Gate

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each token: [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate(*self.gate_up(x).chunk(2, dim=-1)))


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`."""
    return functional.silu(gate).mul_(up)


def gelu_tanh_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `gelu(gate) * up`, with the approximation by a tanh."""
    return functional.gelu(gate, approximate="tanh").mul_(up)


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Compute gpt-oss's `(up + 1) * gate * sigmoid(alpha * gate)`, both inputs clamped."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine, each [tokens, intermediate]; a `Gate`."""
        bounded = gate.clamp(max=self.limit)
        opened = bounded * torch.sigmoid(bounded * self.alpha)
        return opened.mul_(up.clamp(-self.limit, self.limit).add_(1))


def make_gate(config: GateConfig) -> Gate:
    """Return the activation that a config describes."""
    match config.kind:
        case GateKind.SILU:
            return silu_gate
        case GateKind.GELU_TANH:
            return gelu_tanh_gate
        case GateKind.CLAMPED:
            return ClampedGate(config.alpha, config.swiglu_limit)
        case _:
            assert_never(config.kind)
