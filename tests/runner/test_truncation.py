"""Top-k, top-p and min-p keep exactly the tokens their definitions name."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from session_server.core.sampling import SamplingParams
from session_server.runner.truncation import NUM_CANDIDATES, Truncation, thresholds


def kept(probabilities: list[float], rules: Truncation) -> set[int]:
    logits = torch.tensor(probabilities, dtype=torch.float64).log().float()
    scaled = logits - logits.max()
    return kept_together(scaled[None], [rules])[0]


def kept_together(scaled: torch.Tensor, rules: list[Truncation | None]) -> list[set[int]]:
    is_kept = scaled >= thresholds(scaled, rules)
    return [set(row.nonzero().flatten().tolist()) for row in is_kept]


def by_definition(scaled: list[float], rules: Truncation) -> set[int]:
    """The rules one after the other, renormalising, in plain Python."""
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if rules.top_k:
        order = order[: rules.top_k]
    total = math.fsum(math.exp(scaled[i]) for i in order)
    mass, nucleus = 0.0, []
    for i in order:
        nucleus.append(i)
        mass += math.exp(scaled[i]) / total
        if mass >= rules.top_p:
            break
    best = scaled[order[0]]
    return {i for i in nucleus if math.exp(scaled[i] - best) >= rules.min_p}


FOUR = [0.5, 0.3, 0.15, 0.05]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Truncation(1, 1.0, 0.0), {0}),
        (Truncation(3, 1.0, 0.0), {0, 1, 2}),
        (Truncation(0, 0.4, 0.0), {0}),
        (Truncation(0, 0.51, 0.0), {0, 1}),
        (Truncation(0, 0.81, 0.0), {0, 1, 2}),
        (Truncation(0, 0.9999, 0.0), {0, 1, 2, 3}),
        (Truncation(0, 1.0, 0.2), {0, 1, 2}),
        (Truncation(0, 1.0, 0.4), {0, 1}),
        (Truncation(0, 1.0, 1.0), {0}),
        # Of the two kept by top-k, the first has 0.5 / 0.8 = 0.625 of the mass.
        (Truncation(2, 0.6, 0.0), {0}),
        (Truncation(2, 0.65, 0.0), {0, 1}),
        (Truncation(3, 0.9, 0.5), {0, 1}),
    ],
)
def test_rules_keep_what_they_say(rules: Truncation, expected: set[int]) -> None:
    assert kept(FOUR, rules) == expected


@pytest.mark.parametrize("vocab_size", [50, NUM_CANDIDATES * 8])
@pytest.mark.parametrize("sharpness", [0.3, 4.0])
@pytest.mark.parametrize("seed", range(6))
def test_random_rows_keep_the_tokens_of_the_definition(
    vocab_size: int, sharpness: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(vocab_size, generator=generator)
    scaled = logits - logits.max()
    for top_k in (0, 1, 5, vocab_size // 2):
        for top_p in (0.1, 0.5, 0.95, 1.0):
            for min_p in (0.0, 0.02, 0.5):
                rules = Truncation(top_k, top_p, min_p)
                (chosen,) = kept_together(scaled[None], [rules])
                assert chosen == by_definition(scaled.tolist(), rules), rules


def test_a_row_keeps_the_same_tokens_in_any_company() -> None:
    vocab_size = NUM_CANDIDATES * 4
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(60, vocab_size, generator=generator)
    logits *= torch.linspace(0.05, 6.0, 60)[:, None]  # from flat to peaked
    scaled = logits - logits.amax(-1, keepdim=True)
    random = Random(3)
    rules: list[Truncation | None] = [
        random.choice(
            [
                None,
                Truncation(random.randint(1, vocab_size - 1), 1.0, 0.0),
                Truncation(random.choice([3, 700]), random.random(), 0.0),
                Truncation(0, random.random(), 0.0),
                Truncation(0, random.random(), random.random()),
                Truncation(0, 1.0, random.random()),
            ]
        )
        for _ in range(60)
    ]
    together = torch.broadcast_to(thresholds(scaled, rules), (60, 1))
    for row in range(60):
        alone = thresholds(scaled[row : row + 1], rules[row : row + 1])
        assert torch.equal(alone[0], together[row]), rules[row]
    assert kept_together(scaled, rules)[rules.index(None)] == set(range(vocab_size))


def test_ties_at_the_edge_stay_together() -> None:
    assert kept([0.4, 0.2, 0.2, 0.2], Truncation(2, 1.0, 0.0)) == {0, 1, 2, 3}
    assert kept([0.25, 0.25, 0.25, 0.25], Truncation(0, 0.3, 0.0)) == {0, 1, 2, 3}


def test_the_best_token_is_always_kept() -> None:
    flat = [1 / 1000] * 999 + [2 / 1000]
    assert kept(flat, Truncation(0, 1e-9, 0.0)) == {999}


def test_rules_that_keep_everything_are_no_rules() -> None:
    assert Truncation.of(SamplingParams(), 100) is None
    assert Truncation.of(SamplingParams(top_k=100), 100) is None
    assert Truncation.of(SamplingParams(top_k=99), 100) == Truncation(99, 1.0, 0.0)
