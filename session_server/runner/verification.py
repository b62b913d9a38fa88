"""Verify drafts: accept the longest prefix of drafts that equal the sampled tokens.

Speculative decoding usually accepts a draft with a probability that is the ratio of two others
(Leviathan, Kalman and Matias 2023). Here nothing is random: the Gumbel noise is a function of
(seed, position, token id), so the target's token at a position does not depend on the drafts, and a
draft is accepted if it is that token. This is the Gumbel coupling of Daliri, Musco and Suresh,
"Coupling without Communication and Drafter-Invariant Speculative Decoding" (2024): the output is
identical to the one without drafts, sampled or greedy, and a draft model that uses the same noise
is accepted as often as its distribution is close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from cache.pool.upload import upload


class SampleSpan(msgspec.Struct, frozen=True, gc=False):
    """Name one row's positions [position, position + num_tokens) that a forward samples.

    All but the last have a draft, which was the forward's input at that position.
    """

    row: int
    position: int
    num_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Hold the result of verification, on the device.

    `num_accepted`: int64 [spans], accepted drafts. `last`: int64 [spans], index of each span's last
    valid token among all sampled tokens.
    """

    num_accepted: Tensor
    last: Tensor


def verify(choices: Tensor, inputs: Tensor, spans: Sequence[SampleSpan]) -> Acceptance:
    """Compare sampled tokens, int64 [n], with drafts, without waiting for the device.

    `inputs`: int64 [n], the forward's input at the position before each sampled token: except for
    the first of a span, the draft of the token before.
    """
    lengths = np.array([span.num_tokens for span in spans])
    first = np.cumsum(lengths) - lengths
    # Spans of different length become one rectangle, padded by repeating a span's last token.
    steps = np.arange(lengths.max())
    cells = first[:, None] + np.minimum(steps, lengths[:, None] - 1)
    is_real = steps < lengths[:, None]
    at, is_draft = upload(torch.from_numpy(np.stack((cells, is_real))), choices.device)
    is_accepted = (choices[at[:, :-1]] == inputs[at[:, 1:]]) * is_draft[:, 1:]
    num_accepted = is_accepted.cumprod(dim=1).sum(dim=1)
    return Acceptance(num_accepted, at[:, 0] + num_accepted)
