"""Apply rotary position embeddings (Su et al. 2021) as one complex multiplication.

Checkpoints pair dimension i of a head with i + head_dim / 2. Permuting the dimensions of Q and K
alike does not change scores, so the loader reorders the rows of the Q and K projections until pairs
are adjacent (`interleave_pairs`). Rotating a pair is then multiplying one complex number, in place
(2 us instead of 13 for the usual form).
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from session_server.models.config import RopeConfig, RopeKind


class Rope:
    """Compute the angles of positions and rotate heads by them."""

    __slots__ = ("factor", "frequencies")

    def __init__(self, config: RopeConfig, head_dim: int, *, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(config, head_dim).to(device)
        self.factor = torch.tensor(config.attention_factor, dtype=torch.float32, device=device)

    def phases(self, positions: Tensor) -> Tensor:
        """Return the unit rotations of positions [tokens], once per step for all layers.

        They are complex64 [tokens, 1, head_dim / 2], YaRN's attention factor included.
        """
        angles = torch.outer(positions.to(torch.float32), self.frequencies)
        return torch.polar(self.factor.expand_as(angles), angles).unsqueeze(1)

    @staticmethod
    def rotate_(heads: Tensor, phases: Tensor) -> None:
        """Rotate heads in place, in fp32 for every dtype.

        `heads`: [tokens, heads, head_dim], pairs adjacent; the last dimension contiguous.
        """
        if heads.dtype == torch.float32:
            torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2)).mul_(phases)
            return
        pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2))
        heads.copy_(torch.view_as_real(pairs * phases).flatten(-2))


def interleave_pairs(rows: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder the outputs of a Q or K projection so that rotary pairs are adjacent.

    `rows`: [heads * head_dim, ...], head after head, the halves of a head paired. `rotary_dim`:
    leading elements of a head that are rotated; None for all.
    """
    if rotary_dim is not None and rotary_dim < head_dim:
        heads = rows.clone().view(-1, head_dim, *rows.shape[1:])
        rotated = heads[:, :rotary_dim]
        # A copy: of a single head `flatten` is a view, into which it would be copied from itself.
        turned = interleave_pairs(rotated.flatten(0, 1).clone(), rotary_dim)
        rotated.copy_(turned.view(rotated.shape))
        return heads.view(rows.shape)
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return radians per position of every pair, float32 [head_dim / 2], scaling applied."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.factors is not None:
        frequencies = frequencies / torch.tensor(config.factors)
    match config.rope_type:
        case RopeKind.DEFAULT:
            return frequencies
        case RopeKind.LINEAR:
            return frequencies / config.factor
        case RopeKind.LLAMA3:
            return _llama3(frequencies, config)
        case RopeKind.YARN:
            return _yarn(frequencies, config, head_dim)
        case _:
            assert_never(config.rope_type)


def _llama3(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Apply Llama 3.1's scaling: stretch long waves, keep short ones, and ramp in between."""
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_position_embeddings / wavelengths
    kept = ((turns - config.low) / (config.high - config.low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / config.factor


def _yarn(frequencies: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Apply YaRN's scaling (Peng et al. 2023), whose ramp runs over dimensions, not wavelengths."""

    def dimension_of(num_turns: float) -> float:
        ratio = config.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    first, last = dimension_of(config.high), dimension_of(config.low)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((dimensions - first) / (last - first)).clamp(0, 1)
    return stretched * frequencies / config.factor + (1 - stretched) * frequencies
