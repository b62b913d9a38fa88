"""Open a gate in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
import triton
from torch import Tensor

from session_server.attention.triton import launching
from session_server.runner.triton.blocks import NUM_ELEMENTS, block_of
from session_server.runner.triton.fused_kernels import gate_rows


@dataclass(frozen=True, slots=True)
class TritonGate:
    """Compute what a `Gate` does, or `sigmoid(gate) * up`, in one launch, rounded once.

    `alpha`, `limit`: slope and bounds of "clamped".
    """

    kind: Literal["silu", "gelu_tanh", "clamped", "sigmoid"]
    alpha: float = 1.0
    limit: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine, each [tokens, size] with adjacent elements; the result is contiguous."""
        num_tokens, size = gate.shape
        out = torch.empty((num_tokens, size), dtype=up.dtype, device=up.device)
        block = block_of(size, NUM_ELEMENTS)
        launching.run(
            gate_rows,
            (triton.cdiv(num_tokens, block["BLOCK_M"]), triton.cdiv(size, block["BLOCK_N"])),
            gate,
            up,
            out,
            num_tokens,
            gate.stride(0),
            up.stride(0),
            self.alpha,
            self.limit,
            KIND=self.kind,
            SIZE=size,
            **block,
        )
        return out


SIGMOID_GATE: Final = TritonGate("sigmoid")
"""That of gated attention."""
