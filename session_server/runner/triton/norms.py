"""Normalize in one launch, and add and normalize in one."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from session_server.attention.triton import launching
from session_server.models.decoder import AfterNorm
from session_server.models.layers.norm import RmsNorm, Scale
from session_server.runner.triton.blocks import block_of
from session_server.runner.triton.fused_kernels import add_and_norm_rows, norm_rows


class TritonRmsNorm(RmsNorm):
    """Compute what `RmsNorm` does in one launch, rounded once."""

    __slots__ = ()

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Create the norm. `weight`: [size] or [groups, size], contiguous."""
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize `x`, [..., size] or [tokens, groups, size]; the result is contiguous."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(x, out)
        return out

    def apply_(self, x: Tensor) -> None:
        """Normalize `x` in place."""
        self._launch(x, x)

    def _launch(self, x: Tensor, out: Tensor) -> None:
        size = x.shape[-1]
        groups = 1 if x.dim() < 3 else x.shape[-2]
        x, out = (side.unsqueeze(-2) if groups == 1 else side for side in (x, out))
        block = block_of(size)
        num_rows = x.numel() // (groups * size)
        launching.run(
            norm_rows,
            (triton.cdiv(num_rows * groups, block["BLOCK_M"]),),
            x,
            self.weight,
            out,
            num_rows,
            x.stride(0),
            x.stride(1),
            out.stride(0),
            out.stride(1),
            self.eps,
            GROUPS=groups,
            SIZE=size,
            WEIGHT_BY_GROUP=self.weight.dim() > 1,
            **block,
        )


def add_and_norm(
    hidden: Tensor, y: Tensor | None, after: AfterNorm, before: RmsNorm | None
) -> Tensor:
    """Add and normalize as `models.decoder.add_and_norm` does, in one launch."""
    if y is None:
        return hidden if before is None else before(hidden)
    factor, norm = 1.0, None
    if isinstance(after, Scale):
        factor = after.factor
    elif isinstance(after, RmsNorm):
        norm = after
    elif after is not None:
        y = after(y)
    num_tokens, size = hidden.shape
    out = hidden if before is None else torch.empty_like(hidden)
    block = block_of(size)
    launching.run(
        add_and_norm_rows,
        (triton.cdiv(num_tokens, block["BLOCK_M"]),),
        hidden,
        y,
        hidden if norm is None else norm.weight,
        hidden if before is None else before.weight,
        out,
        num_tokens,
        y.stride(0),
        factor,
        0.0 if norm is None else norm.eps,
        0.0 if before is None else before.eps,
        SIZE=size,
        HAS_AFTER=norm is not None,
        HAS_BEFORE=before is not None,
        **block,
    )
    return out
