"""Run a mixture of experts: each token goes to a few of many feed-forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from session_server.models.layers.routing import Router


class Experts(Protocol):
    """The routed feed-forwards of a layer."""

    def __call__(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, beside: Tensor | None
    ) -> Tensor:
        """Sum the chosen experts of each token by their weights.

        Args:
            x: [tokens, hidden].
            topk_weights: [tokens, k], in the dtype of `x`.
            topk_ids: int64 [tokens, k].
            beside: [tokens, hidden] to add the sums to, in place; None for zeros.
        """
        ...


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Send each token to a few experts (Shazeer et al. 2017).

    `shared`: the feed-forward that every token goes through; None if there is none.
    """

    router: Router
    experts: Experts
    shared: Callable[[Tensor], Tensor] | None

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each token: [tokens, hidden] -> [tokens, hidden]."""
        return self.experts(x, *self.router(x), None if self.shared is None else self.shared(x))


@dataclass(frozen=True, slots=True)
class SerialExperts:
    """Run each expert once per step, over all of its tokens; the host counts them."""

    each: Sequence[Callable[[Tensor], Tensor]]

    def __call__(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, beside: Tensor | None
    ) -> Tensor:
        """Sum the chosen experts of each token; see `Experts`."""
        # Sorted by expert, the choices of one expert are adjacent, and one call serves them.
        order = topk_ids.flatten().argsort(stable=True)
        tokens = order // topk_ids.shape[1]
        counts = torch.bincount(topk_ids.flatten(), minlength=len(self.each)).tolist()
        inputs = x.index_select(0, tokens)
        outputs = torch.empty_like(inputs)
        first = 0
        for expert, count in zip(self.each, counts, strict=True):
            if count:
                outputs[first : first + count] = expert(inputs[first : first + count])
                first += count
        outputs *= topk_weights.flatten()[order].unsqueeze(1)
        mixed = torch.zeros_like(x) if beside is None else beside
        return mixed.index_add_(0, tokens, outputs)
