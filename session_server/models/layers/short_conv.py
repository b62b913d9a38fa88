"""Run the short convolution of LFM2 (Liquid AI 2025), gated before and after."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from session_server.attention.base import RecurrentPlan
from session_server.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """Hold the weights of one short convolution layer.

    `inputs`: [hidden] -> [3 * hidden]: the gate before, the gate after, and the gated input.
    `taps`: [width, hidden], the newest token last. `bias`: [hidden] or None. `output`: [hidden] ->
    [hidden].
    """

    inputs: Linear
    taps: Tensor
    bias: Tensor | None
    output: Linear


@dataclass(frozen=True, slots=True)
class ShortConvMixer:
    """Compute `output(after * conv(before * x))`; the state is the last `width - 1` inputs.

    `layer`: index within its pool.
    """

    layer: int
    weights: ShortConvWeights

    def __call__(self, x: Tensor, phases: Tensor, attention: RecurrentPlan) -> Tensor:
        """Mix tokens with the few before them: [tokens, hidden] -> [tokens, hidden]."""
        del phases
        weights = self.weights
        before, after, gated = weights.inputs(x).chunk(3, dim=-1)
        mixed = attention.convolve(self.layer, before * gated, weights.taps, weights.bias)
        return weights.output(mixed.mul_(after))
