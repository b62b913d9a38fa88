"""Which guesses were right: accept the longest prefix of drafts that are what would be chosen.

Speculative decoding usually accepts a draft by a coin whose bias is the ratio of two probabilities
(Leviathan, Kalman and Matias 2023). Here nothing is tossed: a token is chosen by a race whose noise
is a function of (seed, position, token id), so what the target chooses at a position does not
depend on who guessed, and a draft is right when it is that token. This is the Gumbel coupling of
Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding" (2024): the output is identical to the one without drafts, sampled or greedy, and a draft
model that runs the same race guesses as well as its distribution is close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor


class SampleSpan(msgspec.Struct, frozen=True, gc=False):
    """One row's choices in one forward: tokens of positions [position, position + num_tokens).

    All but the last of them have a draft, the token that the forward took for granted there.
    """

    row: int
    position: int
    num_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of the drafts, on the device.

    `num_accepted`: int64 [spans]. `last`: int64 [spans], where the last valid choice of each span
    stands among all choices.
    """

    num_accepted: Tensor
    last: Tensor


def verify(choices: Tensor, inputs: Tensor, spans: Sequence[SampleSpan]) -> Acceptance:
    """Compare choices with drafts, without waiting for the device.

    Args:
        choices: int64 [n], the tokens chosen, span after span.
        inputs: int64 [n], the forward's token at the position before each choice: for all but the
            first of a span, the draft of the choice before.
        spans: they have n choices together.
    """
    lengths = np.array([span.num_tokens for span in spans])
    first = np.cumsum(lengths) - lengths
    # Draws of different length become one rectangle; what sticks out repeats a span's last choice.
    steps = np.arange(lengths.max())
    cells = first[:, None] + np.minimum(steps, lengths[:, None] - 1)
    is_real = steps < lengths[:, None]
    at, is_draft = torch.from_numpy(np.stack((cells, is_real))).to(choices.device)
    is_accepted = (choices[at[:, :-1]] == inputs[at[:, 1:]]) * is_draft[:, 1:]
    num_accepted = is_accepted.cumprod(dim=1).sum(dim=1)
    return Acceptance(num_accepted, at[:, 0] + num_accepted)
