"""Options of sampling are the same in every dialect of OpenAI's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import pytest

from session_server.core.errors import InvalidRequest
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import TextOptions
from session_server.protocol.chat_completions import ChatBody, parse_chat
from session_server.protocol.completions import CompletionBody, parse_completion
from session_server.protocol.realtime_messages import RealtimeSettings
from session_server.protocol.responses import ResponseCreateBody, parse_response

Options = tuple[SamplingParams, TextOptions]

OURS: Final = SamplingParams()


def of_chat(fields: dict[str, Any]) -> Options:
    said = {"messages": [{"role": "user", "content": "Hello"}]}
    body = msgspec.convert(said | fields, ChatBody)
    request = parse_chat(body, turn_id="t", hint="", defaults=OURS).request
    return request.sampling, request.text


def of_completion(fields: dict[str, Any]) -> Options:
    body = msgspec.convert({"prompt": "Hello"} | fields, CompletionBody)
    (request,) = parse_completion(body, completion_id="c", defaults=OURS).requests
    return request.sampling, request.text


def of_response(fields: dict[str, Any]) -> Options:
    body = msgspec.convert({"input": "Hello"} | fields, ResponseCreateBody)
    call = parse_response(body, response_id="r", model="m", created_s=0, defaults=OURS)
    return call.sampling, call.text


def of_realtime(fields: dict[str, Any]) -> Options:
    return msgspec.convert(fields, RealtimeSettings).sampling(OURS)


DIALECTS: Final[Mapping[str, tuple[Callable[[dict[str, Any]], Options], str]]] = {
    "chat": (of_chat, "max_tokens"),
    "completion": (of_completion, "max_tokens"),
    "response": (of_response, "max_output_tokens"),
    "realtime": (of_realtime, "max_output_tokens"),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_has_every_option(name: str) -> None:
    parse, limit = DIALECTS[name]
    fields = {
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"3": -100.0},
        "stop_token_ids": [4],
        "ignore_eos": True,
    }
    sampling, text = parse(
        {**fields, limit: 8, "seed": -1, "stop": "x", "skip_special_tokens": False}
    )
    expected = msgspec.structs.replace(
        OURS,
        **fields
        | {
            "max_tokens": 8,
            "seed": (1 << 63) - 1,
            "logit_bias": ((3, -100.0),),
            "stop_token_ids": (4,),
        },
    )
    assert sampling == expected
    assert text == TextOptions(stop=("x",), skip_special_tokens=False)


@pytest.mark.parametrize("name", DIALECTS)
def test_an_answer_cannot_be_longer_than_it_may_be(name: str) -> None:
    parse, limit = DIALECTS[name]
    with pytest.raises(InvalidRequest, match=f"above {limit}") as refused:
        parse({limit: 8, "min_tokens": 9})
    assert refused.value.param == "min_tokens"
