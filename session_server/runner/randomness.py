"""Generate noise as a pure function of (seed, position, token id), in any batch on any device.

A counter-based generator (Salmon et al. 2011): it stores nothing and has no order. It mixes as
SplitMix64 does (Steele, Lea and Flood 2014), in wrapping int64 arithmetic, which every torch device
computes alike.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def noise_key(seed: int, position: int) -> int:
    """Return the key of one sampled position, as a signed 64-bit integer."""
    return _signed(_mix(_mix(seed) + position * _GOLDEN))


class TokenNoise:
    """Generate standard exponential variates, one per token id."""

    def __init__(self, vocab_size: int, *, device: torch.device) -> None:
        steps = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
        self._counters = steps * _signed(_GOLDEN)

    def exponentials(self, keys: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return Exp(1) variates, float32 in (0, inf], of keys from `noise_key`, int64 [n].

        They are [n] with `token_ids`, one per key, and [n, vocab] without. Small values, which
        decide the sample, are resolved to 2^-53.
        """
        if token_ids is None:
            bits = keys.unsqueeze(1) + self._counters
        else:
            bits = keys + self._counters[token_ids]
        bits ^= (bits >> 30) & ((1 << 34) - 1)  # >> keeps the sign; the mask makes it logical
        bits *= _signed(_FIRST)
        bits ^= (bits >> 27) & ((1 << 37) - 1)
        bits *= _signed(_SECOND)
        bits ^= (bits >> 31) & ((1 << 33) - 1)
        uniform = (((bits >> 11) & ((1 << 53) - 1)) + 1).to(torch.float32).mul_(2.0**-53)
        return torch.log1p(uniform.neg_()).neg_()


def _mix(value: int) -> int:
    """Apply SplitMix64's finalizer to an unsigned 64-bit integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
