"""Choose the most likely tokens, and notice logits that are no numbers, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from session_server.runner import native


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens with the largest logits, and which rows are finite.

    `logits`: float32 [n, vocab]. The tokens are int64 [n], the lowest id among equals, and
    arbitrary where a row is not finite; the rows are bool [n]. Both are on the device of `logits`.
    """
    if logits.device.type != "cpu" or not native.is_available():
        return logits.argmax(dim=-1), all_finite(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    is_finite = torch.empty(len(logits), dtype=torch.bool)
    native.argmax(logits.numpy(), tokens.numpy(), is_finite.numpy())
    return tokens, is_finite


def all_finite(logits: Tensor) -> Tensor:
    """Return which rows of [n, vocab] are finite: bool [n].

    A sum is NaN or infinite as soon as one logit is: one pass, no [n, vocab] of booleans.
    """
    return logits.sum(dim=-1).isfinite()
