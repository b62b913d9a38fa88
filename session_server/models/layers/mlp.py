"""The dense feed-forward."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from session_server.models.layers.linear import Linear


class SwiGlu:
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020) with gate and up fused."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        """Args:
        gate_up: [hidden] -> [2 * intermediate], gate before up.
        down: [intermediate] -> [hidden].
        """
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(functional.silu(gate).mul_(up))
