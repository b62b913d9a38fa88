"""Run a mixture of experts: each token goes to a few of many feed-forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from session_server.models.layers.routing import Router


class MixtureOfExperts:
    """Run each expert once per step, over all of its tokens (Shazeer et al. 2017)."""

    __slots__ = ("_experts", "_router", "_shared")

    def __init__(
        self,
        router: Router,
        experts: Sequence[Callable[[Tensor], Tensor]],
        shared: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """Create the mixture.

        Args:
            router: chooses the experts of each token.
            experts: the feed-forwards.
            shared: the feed-forward that every token goes through; None if there is none.
        """
        self._router = router
        self._experts = tuple(experts)
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each token: [tokens, hidden] -> [tokens, hidden]."""
        topk_weights, topk_ids = self._router(x)
        # Sorted by expert, the choices of one expert are adjacent, and one call serves them.
        order = topk_ids.flatten().argsort(stable=True)
        tokens = order // topk_ids.shape[1]
        counts = torch.bincount(topk_ids.flatten(), minlength=len(self._experts)).tolist()
        inputs = x.index_select(0, tokens)
        outputs = torch.empty_like(inputs)
        first = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                outputs[first : first + count] = expert(inputs[first : first + count])
                first += count
        outputs *= topk_weights.flatten()[order].unsqueeze(1)
        mixed = torch.zeros_like(x) if self._shared is None else self._shared(x)
        return mixed.index_add_(0, tokens, outputs)
