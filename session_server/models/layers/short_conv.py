"""The short convolution of LFM2 (Liquid AI 2025): gated before and after."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from session_server.attention.recurrent import RecurrentPlan
from session_server.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """What one layer has learned.

    `inputs`: [hidden] -> [3 * hidden], the gate before, the gate after, and what is gated. `taps`:
    [width, hidden], the newest last. `bias`: [hidden] or None. `output`: [hidden] -> [hidden].
    """

    inputs: Linear
    taps: Tensor
    bias: Tensor | None
    output: Linear


@dataclass(frozen=True, slots=True)
class ShortConvMixer:
    """`output(after * conv(before * x))`; its state is the last `width - 1` inputs.

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
