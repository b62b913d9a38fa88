"""The mixture of experts: every token goes to a few of many feed-forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from session_server.models.layers.linear import Linear


class MixtureOfExperts:
    """Top-k routing (Shazeer et al. 2017). An expert runs once per step, over all of its tokens."""

    __slots__ = ("_experts", "_is_normalised", "_num_chosen", "_router")

    def __init__(
        self,
        router: Linear,
        experts: Sequence[Callable[[Tensor], Tensor]],
        *,
        num_chosen: int,
        is_normalised: bool,
    ) -> None:
        """Args:
        router: [hidden] -> [experts], scores.
        experts: the feed-forwards, each [tokens, hidden] -> [tokens, hidden].
        num_chosen: experts per token.
        is_normalised: whether the weights of the chosen add up to one.
        """
        self._router = router
        self._experts = tuple(experts)
        self._num_chosen = num_chosen
        self._is_normalised = is_normalised

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        weights, chosen = self._route(x)
        # Choices sorted by expert: those of one expert are neighbours, and one call serves them.
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self._num_chosen
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        inputs = x.index_select(0, tokens)
        outputs = torch.empty_like(inputs)
        first = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                outputs[first : first + count] = expert(inputs[first : first + count])
                first += count
        outputs *= weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add_(0, tokens, outputs)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, in the dtype of `x`, and indices of the chosen experts, each [tokens, k]."""
        shares = torch.softmax(self._router(x), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self._num_chosen, dim=-1)
        if self._is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen
