"""Normalize by root mean square (Zhang and Sennrich 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    __slots__ = ("_floor", "_gain", "_size", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Create the norm.

        `weight`: [..., size]; leading dimensions, if any, broadcast against those of `x`.
        """
        size = weight.shape[-1]
        self._size = (size,)
        self.eps = eps
        self.weight = weight
        is_fp32_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        # With n elements, sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n * eps)) / sqrt(n): four small
        # calls instead of the six torch's CPU rms_norm makes (7 us against 13 at decode).
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=torch.float32)
        self._gain = weight * math.sqrt(size) if is_fp32_cpu else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize `x`; the result has its shape and dtype."""
        if self._gain is None:
            normed: Tensor = functional.rms_norm(x, self._size, eps=self.eps)
            return normed * self.weight
        length: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
        return (x / torch.hypot(length, self._floor)).mul_(self._gain)

    def apply_(self, x: Tensor) -> None:
        """Normalize `x` in place."""
        if self._gain is None:
            x.copy_(self(x))
            return
        length: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
        x.div_(torch.hypot(length, self._floor)).mul_(self._gain)


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiply by a factor, in the place of a norm."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` in place."""
        return x.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class ProjectionNorm:
    """Normalize Q and K, each over all of its heads together: weights [heads * head_dim] of each.

    `num_heads`: query heads.
    """

    q: RmsNorm
    k: RmsNorm
    num_heads: int

    def apply_(self, heads: Tensor) -> None:
        """Normalize in place: [tokens, q_heads + kv_heads, head_dim]."""
        self.q.apply_(heads[:, : self.num_heads].flatten(1))
        self.k.apply_(heads[:, self.num_heads :].flatten(1))
