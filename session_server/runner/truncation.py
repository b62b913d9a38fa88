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

NUM_CANDIDATES: Final = 1024
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
    vocab_size = scaled.shape[0]
    num_sorted = max(NUM_CANDIDATES, rules.top_k)
    if scaled.device.type != "cpu" or 4 * num_sorted > vocab_size:
        num_sorted = vocab_size
    ordered = scaled.topk(num_sorted).values if num_sorted < vocab_size else _sorted(scaled)
    if rules.top_k:
        by_rank = ordered[rules.top_k - 1]
        lowest = torch.maximum(lowest, by_rank)
        ordered = ordered.masked_fill(ordered < by_rank, -math.inf)
    if rules.top_p < 1.0:
        # Without top-k the mass is that of the whole vocabulary, sorted or not.
        total = torch.logsumexp(ordered if rules.top_k else scaled, dim=0)
        mass = torch.exp(ordered - total).cumsum(0)
        if num_sorted < vocab_size and not rules.top_k and float(mass[-1]) < rules.top_p:
            ordered = _sorted(scaled)
            mass = torch.exp(ordered - total).cumsum(0)
        # The token that carries the mass over top_p is the last one kept.
        num_kept = (mass < rules.top_p).sum().clamp_(max=len(ordered) - 1)
        lowest = torch.maximum(lowest, ordered[num_kept])
    return lowest


def _sorted(scaled: Tensor) -> Tensor:
    return scaled.sort(descending=True).values
