"""Run a mixture of experts: each token goes to a few of many feed-forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from session_server.models.layers.routing import Router


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Run each expert once per step, over all of its tokens (Shazeer et al. 2017).

    `shared`: the feed-forward that every token goes through; None if there is none.
    """

    router: Router
    experts: Sequence[Callable[[Tensor], Tensor]]
    shared: Callable[[Tensor], Tensor] | None

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each token: [tokens, hidden] -> [tokens, hidden]."""
        topk_weights, topk_ids = self.router(x)
        # Sorted by expert, the choices of one expert are adjacent, and one call serves them.
        order = topk_ids.flatten().argsort(stable=True)
        tokens = order // topk_ids.shape[1]
        counts = torch.bincount(topk_ids.flatten(), minlength=len(self.experts)).tolist()
        inputs = x.index_select(0, tokens)
        outputs = torch.empty_like(inputs)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                outputs[first : first + count] = expert(inputs[first : first + count])
                first += count
        outputs *= topk_weights.flatten()[order].unsqueeze(1)
        mixed = torch.zeros_like(x) if self.shared is None else self.shared(x)
        return mixed.index_add_(0, tokens, outputs)
