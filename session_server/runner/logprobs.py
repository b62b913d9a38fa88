"""Compute log-probabilities of the model's own distribution, before temperature and truncation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from session_server.core.sampling import TokenLogprob


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Hold logprobs that are still on the device.

    `chosen`: int64 [n]; `logprobs`: float32 [n]; `top_ids`, `top_logprobs`: [n, k], best first.
    """

    chosen: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def map(self, move: Callable[[Tensor], Tensor]) -> DeviceLogprobs:
        """Return the tensors after `move`, such as a copy to the host."""
        return DeviceLogprobs(
            move(self.chosen), move(self.logprobs), move(self.top_ids), move(self.top_logprobs)
        )

    def to_host(self, num_top: list[int]) -> list[TokenLogprob]:
        """Return one value per row; row i keeps `num_top[i]` alternatives. Waits for the device."""
        ids, values = self.chosen.tolist(), self.logprobs.tolist()
        top_ids, top_values = self.top_ids.tolist(), self.top_logprobs.tolist()
        return [
            TokenLogprob(
                ids[i], values[i], tuple(zip(top_ids[i][:k], top_values[i][:k], strict=True))
            )
            for i, k in enumerate(num_top)
        ]


def token_logprobs(logits: Tensor, chosen: Tensor, *, num_top: int) -> DeviceLogprobs:
    """Compute logprobs of the tokens `chosen`, int64 [n], and of `num_top` alternatives per row.

    `logits`: float32 [n, vocab], raw.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    of_chosen = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1)
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return DeviceLogprobs(chosen, of_chosen, top.indices, top.values)
