"""Select the tokens that stay candidates: top-k, then top-p, then min-p.

Each rule is a threshold on the scaled logit, and tokens that tie with the last one kept are kept
too. So a row's candidates depend on that row alone, never on how a sort broke ties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from cache.pool.upload import upload_values
from session_server.core.sampling import SamplingParams

NUM_CANDIDATES: Final = 256
"""Sorted first on a CPU; enough for top-p unless the distribution is flat."""

_CANDIDATES_GROWTH: Final = 16
"""Growth of the number sorted when it was not enough, up to the whole vocabulary."""

_LOWEST: Final = float(torch.finfo(torch.float32).min)
"""Keeps every token but those that a grammar forbids, which are infinitely lower."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Hold the rules of one row; `top_k` 0, `top_p` 1 and `min_p` 0 keep everything."""

    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Truncation | None:
        """Return the rules of a request; None if they keep everything."""
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        if not top_k and params.top_p >= 1.0 and params.min_p == 0.0:
            return None
        return cls(top_k, params.top_p, params.min_p)

    @property
    def needs_order(self) -> bool:
        """Return whether the logits must be sorted."""
        return self.top_k > 0 or self.top_p < 1.0


def thresholds(scaled: Tensor, rules: Sequence[Truncation | None]) -> Tensor:
    """Return the lowest logit that each row keeps.

    Args:
        scaled: float32 [n, vocab], logits over temperature, the largest of each row 0.
        rules: of the n rows; None keeps everything.

    Returns:
        float32 [n, 1]; tokens with `scaled >= threshold` are candidates. A row's value does not
        depend on the other rows: its sorted values and running sums are the same however many of
        them the other rows need.
    """
    floors = [math.log(r.min_p) if r is not None and r.min_p > 0.0 else _LOWEST for r in rules]
    lowest = upload_values(floors, torch.float32, scaled.device).unsqueeze(1)
    ordering = [i for i, r in enumerate(rules) if r is not None and r.needs_order]
    if not ordering:
        return lowest
    ordered_rules = [r for r in rules if r is not None and r.needs_order]
    if len(ordering) == len(rules):
        return torch.maximum(lowest, _edges(scaled, ordered_rules))
    index = upload_values(ordering, torch.int64, scaled.device)
    edges = _edges(scaled.index_select(0, index), ordered_rules)
    edges = torch.maximum(lowest.index_select(0, index), edges)
    return lowest.index_copy(0, index, edges)


def _edges(scaled: Tensor, rules: Sequence[Truncation]) -> Tensor:
    """Return the logit of the last token that top-k, then top-p keep, [n, 1]."""
    vocab_size, is_on_host = scaled.shape[1], scaled.device.type == "cpu"
    num_sorted = max(r.top_k or NUM_CANDIDATES for r in rules)
    if not is_on_host and not all(r.top_k for r in rules):
        num_sorted = vocab_size  # checking whether fewer suffice would synchronize
    while num_sorted < vocab_size:
        edges, is_inside = _nucleus_edges(scaled, scaled.topk(num_sorted).values, rules)
        if not is_on_host or bool(is_inside.all()):
            return edges
        num_sorted *= _CANDIDATES_GROWTH
    ordered = scaled.sort(dim=-1, descending=True).values
    return _nucleus_edges(scaled, ordered, rules)[0]


def _nucleus_edges(
    scaled: Tensor, ordered: Tensor, rules: Sequence[Truncation]
) -> tuple[Tensor, Tensor]:
    """Return the logit of the token that brings the running mass to top_p, the last one kept.

    Returns:
        (its logit [n, 1], whether `ordered` was long enough to reach the mass [n, 1]).
    """

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return upload_values(values, dtype, ordered.device).unsqueeze(1)

    ranks = column([(r.top_k or ordered.shape[1]) - 1 for r in rules], torch.int64)
    shares = column([r.top_p if r.top_p < 1.0 else math.inf for r in rules], torch.float32)
    is_ranked = column([r.top_k > 0 for r in rules], torch.bool)
    running = ordered.exp().cumsum(-1)
    totals = running.gather(1, ranks)
    if not all(r.top_k for r in rules):
        # The largest logit is 0, so its probability is one over the mass of the vocabulary.
        of_vocabulary = torch.softmax(scaled, dim=-1).amax(dim=-1, keepdim=True).reciprocal()
        totals = torch.where(is_ranked, totals, of_vocabulary)
    mass = shares * totals
    last = torch.minimum((running < mass).sum(dim=-1, keepdim=True), ranks)
    return ordered.gather(1, last), is_ranked | (running[:, -1:] >= mass)
