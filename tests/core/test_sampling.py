"""What sampling parameters say about themselves."""

from __future__ import annotations

import pytest

from session_server.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(top_k=1), True),
        (SamplingParams(top_k=2), False),
    ],
)
def test_greedy_is_temperature_zero_or_one_candidate(
    params: SamplingParams, is_greedy: bool
) -> None:
    assert params.is_greedy is is_greedy


@pytest.mark.parametrize(
    ("params", "has_penalties"),
    [
        (SamplingParams(), False),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=-1.0), True),
        (SamplingParams(frequency_penalty=-1.0), True),
    ],
)
def test_each_penalty_counts_alone(params: SamplingParams, has_penalties: bool) -> None:
    assert params.has_penalties is has_penalties
