"""Normalize by root mean square (Zhang and Sennrich 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    __slots__ = ("_eps", "_floor", "_gain", "_size", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Create the norm.

        Args:
            weight: [..., size]; leading dimensions, if any, broadcast against those of `x`.
            eps: added to the mean square.
        """
        size = weight.shape[-1]
        self._size = (size,)
        self._eps = eps
        self._weight = weight
        # With n elements, sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n * eps)) / sqrt(n): four small
        # calls instead of the six torch's CPU rms_norm makes (7 us against 13 at decode).
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=torch.float32)
        self._gain = weight * math.sqrt(size) if _is_fp32_cpu(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize `x`; the result has its shape and dtype."""
        if self._gain is None:
            normed: Tensor = functional.rms_norm(x, self._size, eps=self._eps)
            return normed * self._weight
        length: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
        return (x / torch.hypot(length, self._floor)).mul_(self._gain)

    def apply_(self, x: Tensor) -> None:
        """Normalize `x` in place."""
        if self._gain is None:
            x.copy_(self(x))
            return
        length: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
        x.div_(torch.hypot(length, self._floor)).mul_(self._gain)


class Scale:
    """Multiply by a factor, in the place of a norm."""

    __slots__ = ("_factor",)

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` in place."""
        return x.mul_(self._factor)


class ProjectionNorm:
    """Normalize Q and K, each over all of its heads together."""

    __slots__ = ("_k", "_num_heads", "_q")

    def __init__(self, q: RmsNorm, k: RmsNorm, *, num_heads: int) -> None:
        """Create the norm.

        Args:
            q, k: weights [heads * head_dim] of each.
            num_heads: query heads.
        """
        self._q = q
        self._k = k
        self._num_heads = num_heads

    def apply_(self, heads: Tensor) -> None:
        """Normalize in place: [tokens, q_heads + kv_heads, head_dim]."""
        self._q.apply_(heads[:, : self._num_heads].flatten(1))
        self._k.apply_(heads[:, self._num_heads :].flatten(1))


def _is_fp32_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32
