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


def make_gate(config: GateConfig) -> Gate:
    """Return the activation that a config describes."""
    match config.kind:
        case GateKind.SILU:
            return lambda gate, up: functional.silu(gate).mul_(up)
        case GateKind.GELU_TANH:
            return lambda gate, up: functional.gelu(gate, approximate="tanh").mul_(up)
        case GateKind.CLAMPED:
            return lambda gate, up: _clamped(gate, up, config)
        case _:
            assert_never(config.kind)


def _clamped(gate: Tensor, up: Tensor, config: GateConfig) -> Tensor:
    """Compute gpt-oss's `(up + 1) * gate * sigmoid(alpha * gate)`, both inputs clamped."""
    bounded = gate.clamp(max=config.swiglu_limit)
    opened = bounded * torch.sigmoid(bounded * config.alpha)
    return opened.mul_(up.clamp(-config.swiglu_limit, config.swiglu_limit).add_(1))
