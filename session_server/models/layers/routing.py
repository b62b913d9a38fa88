"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

import torch
from torch import Tensor

from session_server.models.config import MoeConfig, ScoringFunc
from session_server.models.layers.linear import Linear


class Router:
    """The best experts (Shazeer et al. 2017), of all or of the best groups (DeepSeek-AI 2024)."""

    __slots__ = ("_config", "_correction", "_scores")

    def __init__(self, scores: Linear, config: MoeConfig, correction: Tensor | None) -> None:
        """Args:
        scores: [hidden] -> [experts].
        config: of experts and groups.
        correction: float32 [experts], added to shares where experts are chosen, and not in their
            weights; None for nothing.
        """
        self._scores = scores
        self._config = config
        self._correction = correction

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, in the dtype of `x`, and indices of the chosen experts, each [tokens, k]."""
        config, routing = self._config, self._config.routing
        scores = self._scores(x).float()
        is_softmax = routing.scoring_func is ScoringFunc.SOFTMAX
        shares = scores.softmax(-1) if is_softmax else scores.sigmoid()
        merits = shares if self._correction is None else shares + self._correction
        if routing.topk_group < routing.n_group:
            merits = self._of_best_groups(merits)
        chosen = merits.topk(config.num_experts_per_tok, dim=-1).indices
        weights = shares.gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if routing.routed_scaling_factor != 1.0:
            weights = weights * routing.routed_scaling_factor
        return weights.to(x.dtype), chosen

    def _of_best_groups(self, merits: Tensor) -> Tensor:
        """`merits` [tokens, experts], minus infinity in all other groups."""
        routing = self._config.routing
        by_group = merits.view(len(merits), routing.n_group, -1)
        num_counted = 1 if routing.scoring_func is ScoringFunc.SOFTMAX else 2
        of_groups = by_group.topk(num_counted, dim=-1).values.sum(-1)
        best = of_groups.topk(routing.topk_group, dim=-1).indices
        is_left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, value=False)
        return by_group.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(1)
