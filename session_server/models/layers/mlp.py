"""Run gated feed-forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from session_server.models.config import GateConfig, GateKind
from session_server.models.layers.linear import Linear

Gate = Callable[[Tensor, Tensor], Tensor]
"""Combine (gate, up) to the input of the down projection, each [tokens, intermediate]."""


class GatedMlp:
    """Compute `down(act(gate(x)) * up(x))` (Shazeer 2020) with gate and up fused."""

    __slots__ = ("_down", "_gate", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear, gate: Gate) -> None:
        """Create the feed-forward.

        Args:
            gate_up: [hidden] -> [2 * intermediate], gate before up.
            down: [intermediate] -> [hidden].
            gate: from `make_gate`.
        """
        self._gate_up = gate_up
        self._down = down
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each token: [tokens, hidden] -> [tokens, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._gate(gate, up))


def make_gate(config: GateConfig) -> Gate:
    """Return the activation that a config describes."""
    match config.kind:
        case GateKind.SILU:
            return _silu
        case GateKind.GELU_TANH:
            return _gelu_tanh
        case GateKind.CLAMPED:
            return lambda gate, up: _clamped(gate, up, config)
        case _:
            assert_never(config.kind)


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate).mul_(up)


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh").mul_(up)


def _clamped(gate: Tensor, up: Tensor, config: GateConfig) -> Tensor:
    """Compute gpt-oss's `(up + 1) * gate * sigmoid(alpha * gate)`, both inputs clamped."""
    bounded = gate.clamp(max=config.swiglu_limit)
    opened = bounded * torch.sigmoid(bounded * config.alpha)
    return opened.mul_(up.clamp(-config.swiglu_limit, config.swiglu_limit).add_(1))
