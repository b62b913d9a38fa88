"""Choose the experts of each token, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from session_server.models.config import MoeConfig, ScoringFunc
from session_server.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Router:
    """Choose the top-k experts (Shazeer et al. 2017), of all or of the best groups (DeepSeek 2024).

    `gate`: [hidden] -> [experts]. `correction`: float32 [experts], added to the scores that choose
    experts, but not to their weights; None for none.
    """

    gate: Linear
    config: MoeConfig
    correction: Tensor | None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights, in the dtype of `x`, and ids of the chosen experts, each [tokens, k]."""
        config, routing = self.config, self.config.routing
        logits = self.gate(x).float()
        is_softmax = routing.scoring_func is ScoringFunc.SOFTMAX
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        choice_scores = scores if self.correction is None else scores + self.correction
        if routing.topk_group < routing.n_group:
            choice_scores = self._mask_other_groups(choice_scores)
        topk_ids = choice_scores.topk(config.num_experts_per_tok, dim=-1).indices
        topk_weights = scores.gather(1, topk_ids)
        if config.norm_topk_prob:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        if routing.routed_scaling_factor != 1.0:
            topk_weights = topk_weights * routing.routed_scaling_factor
        return topk_weights.to(x.dtype), topk_ids

    def _mask_other_groups(self, choice_scores: Tensor) -> Tensor:
        """Set `choice_scores` [tokens, experts] to -inf outside the best groups of each token."""
        routing = self.config.routing
        by_group = choice_scores.view(len(choice_scores), routing.n_group, -1)
        num_counted = 1 if routing.scoring_func is ScoringFunc.SOFTMAX else 2
        of_groups = by_group.topk(num_counted, dim=-1).values.sum(-1)
        best = of_groups.topk(routing.topk_group, dim=-1).indices
        is_left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, value=False)
        return by_group.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(1)
