"""SGLang's names in our words, and our outcomes in its words."""

from __future__ import annotations

import json

import pytest

from session_server.core.errors import InvalidRequest
from session_server.core.sampling import MAX_OUTPUT_TOKENS
from session_server.core.session_events import (
    Outcome,
    TextInput,
    TextOptions,
    TokenInput,
    TokenUsage,
)
from session_server.protocol.messages import decode
from session_server.protocol.sglang import (
    DEFAULT_MAX_NEW_TOKENS,
    GenerateBody,
    Generation,
    parse_generation,
)

NOTHING = Outcome("i", "", (), TokenUsage(9, 3, 0), None)


def understood(**fields: object) -> Generation:
    body = decode(json.dumps({"text": "a", **fields}), GenerateBody)
    return parse_generation(body, rid="r", turn_id="t")


def test_every_sampling_name_is_translated() -> None:
    params = {
        "max_new_tokens": 5,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "ignore_eos": True,
        "sampling_seed": 11,
        "stop": ["x"],
        "stop_token_ids": [4],
        "logit_bias": {"7": 2},
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "n": 1,
        "spaces_between_special_tokens": True,
        "regex": None,
    }
    request = understood(sampling_params=params).request
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (5, 2, 0.5)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 0, 0.1)
    assert sampling.repetition_penalty == 1.1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert (sampling.ignore_eos, sampling.seed) == (True, 11)
    assert (sampling.stop_token_ids, sampling.logit_bias) == ((4,), ((7, 2.0),))
    assert request.text == TextOptions(stop=("x",), keep_stop=True, skip_special_tokens=False)
    assert (request.queue, request.on_disconnect) == (False, "cancel")


def test_what_is_absent_null_or_unknown_takes_sglangs_defaults() -> None:
    plain = understood().request
    assert plain.input == TextInput("a")
    assert plain.sampling.max_tokens == DEFAULT_MAX_NEW_TOKENS
    nulls = understood(
        sampling_params={"temperature": None, "stop": None},
        rid=None,
        stream=None,
        custom={"a": [1]},
    )
    assert nulls.request == plain
    huge = understood(sampling_params={"max_new_tokens": 1 << 40}).request
    assert huge.sampling.max_tokens == MAX_OUTPUT_TOKENS


def test_logprobs_are_asked_for_where_sglang_would() -> None:
    wanted = understood(return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
    assert wanted.request.sampling.logprobs is True
    assert wanted.request.sampling.top_logprobs == 3
    assert wanted.request.sampling.prompt_logprobs_from == 0
    outputs_only = understood(return_logprob=True, logprob_start_len=-1)
    assert outputs_only.request.sampling.prompt_logprobs_from is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"text": None}, "Either text or input_ids"),
        ({"input_ids": [1]}, "Either text or input_ids"),
        ({"text": ["a"]}, "batch"),
        ({"text": None, "input_ids": [[1]]}, "batch"),
        ({"text": None, "input_ids": [[1], 2]}, "batch"),
        ({"text": None, "input_ids": [1, [2]]}, "token ids"),
        ({"text": None, "input_ids": [-1]}, "token ids"),
        ({"text": None, "input_ids": [1.5]}, "token ids"),
        ({"sampling_params": [{}]}, "batch"),
        ({"rid": ["r"]}, "batch"),
        ({"image_data": "x"}, "not supported"),
        ({"sampling_params": {"min_new_tokens": 3, "max_new_tokens": 2}}, "min_new_tokens"),
        ({"session_params": {"rid": "r"}}, "Invalid request session id"),
        ({"session_id": "a", "session_params": {"id": "a"}}, "cannot both be set"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        understood(**fields)


def test_token_ids_and_a_session_are_taken_as_they_are() -> None:
    job = understood(text=None, input_ids=[1, 2], session_params={"id": "s", "rid": None})
    assert job.request.input == TokenInput((1, 2))
    assert job.session is not None
    assert (job.session.id, job.session.rid) == ("s", None)
    by_id = understood(session_id="s")
    assert by_id.session is not None
    assert by_id.session.id == "s"
