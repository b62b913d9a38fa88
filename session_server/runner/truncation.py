"""Which tokens stay candidates: top-k, then top-p, then min-p.

Each rule is a threshold on the scaled logit, and tokens that tie with the last one kept are kept
too. So a row's candidates depend on that row alone, never on how a sort broke ties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from session_server.core.sampling import SamplingParams

NUM_CANDIDATES: Final = 256
"""Sorted first on a CPU; a row that needs more sorts its whole vocabulary."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The rules of one row; `top_k` 0, `top_p` 1 and `min_p` 0 keep everything."""

    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Truncation | None:
        """The rules a request asks for; None when they keep everything."""
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        if not top_k and params.top_p >= 1.0 and params.min_p == 0.0:
            return None
        return cls(top_k, params.top_p, params.min_p)

    @property
    def needs_order(self) -> bool:
        """Whether the logits must be sorted."""
        return self.top_k > 0 or self.top_p < 1.0


def threshold(scaled: Tensor, rules: Truncation) -> Tensor:
    """The lowest logit kept.

    Args:
        scaled: float32 [vocab], logits over temperature, the largest of them 0.
        rules: of this row.

    Returns:
        float32 scalar; tokens with `scaled >= threshold` are candidates.
    """
    lowest = scaled.new_tensor(math.log(rules.min_p) if rules.min_p > 0.0 else -math.inf)
    if not rules.needs_order:
        return lowest
    if rules.top_k:
        ordered = scaled.topk(rules.top_k).values
        lowest = torch.maximum(lowest, ordered[-1])
        if rules.top_p == 1.0:
            return lowest
        edge, _ = _nucleus_edge(ordered, rules.top_p * ordered.exp().sum())
        return torch.maximum(lowest, edge)
    # The mass is that of the whole vocabulary, sorted or not.
    mass = rules.top_p * scaled.exp().sum()
    if scaled.device.type == "cpu" and scaled.shape[0] > NUM_CANDIDATES:
        edge, is_inside = _nucleus_edge(scaled.topk(NUM_CANDIDATES).values, mass)
        if bool(is_inside):
            return torch.maximum(lowest, edge)
    edge, _ = _nucleus_edge(scaled.sort(descending=True).values, mass)
    return torch.maximum(lowest, edge)


def _nucleus_edge(ordered: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The token that carries the running sum of `exp(ordered)` over `mass` is the last one kept.

    Returns:
        (its logit, whether `ordered` was long enough to reach the mass).
    """
    running = ordered.exp().cumsum(0)
    num_before = (running < mass).sum()
    return ordered[num_before.clamp(max=len(ordered) - 1)], running[-1] >= mass
