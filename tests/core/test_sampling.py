"""What sampling parameters say about themselves."""

from __future__ import annotations

import msgspec
import pytest

from session_server.core.sampling import (
    MAX_LOGIT_BIAS,
    MAX_OUTPUT_TOKENS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)


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


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("max_tokens", [0, MAX_OUTPUT_TOKENS], [-1, MAX_OUTPUT_TOKENS + 1]),
        ("min_tokens", [0, MAX_OUTPUT_TOKENS], [-1, MAX_OUTPUT_TOKENS + 1]),
        ("temperature", [0.0, 100.0], [-0.01, 100.01]),
        ("top_k", [0, 1 << 30], [-1, (1 << 30) + 1]),
        ("top_p", [0.01, 1.0], [0.0, 1.01]),
        ("min_p", [0.0, 1.0], [-0.01, 1.01]),
        ("repetition_penalty", [0.01, 10.0], [0.0, 10.01]),
        ("presence_penalty", [-2.0, 2.0], [-2.01, 2.01]),
        ("frequency_penalty", [-2.0, 2.0], [-2.01, 2.01]),
        ("seed", [None, 0, (1 << 63) - 1], [-1, 1 << 63]),
        ("top_logprobs", [0, MAX_TOP_LOGPROBS], [-1, MAX_TOP_LOGPROBS + 1]),
        ("prompt_logprobs_from", [None, 0], [-1]),
        ("logit_bias", [[[1, 0.5]] * MAX_LOGIT_BIAS], [[[1, 0.5]] * (MAX_LOGIT_BIAS + 1)]),
        ("stop_token_ids", [[1] * MAX_STOP_TOKEN_IDS], [[1] * (MAX_STOP_TOKEN_IDS + 1)]),
    ],
)
def test_a_parameter_has_its_bounds(
    name: str, allowed: list[object], refused: list[object]
) -> None:
    for value in allowed:
        msgspec.convert({name: value}, SamplingParams)
    for value in refused:
        with pytest.raises(msgspec.ValidationError, match=name):
            msgspec.convert({name: value}, SamplingParams)
