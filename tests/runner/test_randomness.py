"""Noise is a function of (seed, position, token id), and looks like noise."""

from __future__ import annotations

import math

import torch

from session_server.runner.randomness import TokenNoise, noise_key

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def split_mix(state: int) -> int:
    """SplitMix64 in plain integers."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_a_variate_is_split_mix_of_key_and_token() -> None:
    keys = [noise_key(seed, position) for seed in (0, 1, 2**62 + 3) for position in (0, 7, 99_999)]
    drawn = TokenNoise(64, device=CPU).exponentials(torch.tensor(keys))
    for key, of_key in zip(keys, drawn.tolist(), strict=True):
        for token, value in enumerate(of_key):
            bits = split_mix((key + token * 0x9E3779B97F4A7C15) & MASK)
            expected = -math.log1p(-((bits >> 11) + 1) / 2**53) if bits >> 11 != MASK >> 11 else 0
            assert math.isclose(value, expected, rel_tol=2e-4), (key, token)


def test_chosen_tokens_have_the_noise_they_have_among_all() -> None:
    noise = TokenNoise(500, device=CPU)
    keys = torch.tensor([noise_key(3, 4), noise_key(3, 5)])
    ids = torch.tensor([499, 0, 17])
    everything = noise.exponentials(keys)
    for row, key in enumerate(keys):
        assert torch.equal(noise.exponentials(key.expand(3), ids), everything[row, ids])


def test_neighbouring_seeds_positions_and_tokens_are_independent() -> None:
    noise = TokenNoise(2000, device=CPU)
    keys = [noise_key(seed, position) for seed in range(20) for position in range(20)]
    assert len(set(keys)) == len(keys)
    drawn = noise.exponentials(torch.tensor(keys))
    # Mean and standard deviation of Exp(1) are 1; bounds are five standard errors.
    error = 5 / math.sqrt(drawn.numel())
    assert abs(drawn.mean().item() - 1) < error
    assert abs(drawn.std().item() - 1) < 2 * error
    rows, columns = (torch.corrcoef(m)[0, 1:] for m in (drawn, drawn.T.contiguous()))
    assert rows.abs().max().item() < 5 / math.sqrt(drawn.shape[1])
    assert columns.abs().max().item() < 5 / math.sqrt(drawn.shape[0])


def test_variates_are_positive_so_that_their_logarithm_exists() -> None:
    keys = torch.tensor([noise_key(9, position) for position in range(200)])
    drawn = TokenNoise(5000, device=CPU).exponentials(keys)
    assert drawn.min().item() > 0
    assert torch.isfinite(drawn).all()
