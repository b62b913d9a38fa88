"""What a Chat Completion's body becomes, and what its answer is made of."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_OUTPUT_TOKENS, SamplingParams, TokenLogprob
from session_server.core.session_events import ChatInput, Message, ToolCall
from session_server.protocol.chat_answer import AnswerHead, CallUsage, ChatAnswer
from session_server.protocol.chat_completions import (
    ChatBody,
    ChatCall,
    parse_chat,
    session_id_of,
)
from session_server.protocol.messages import decode

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell it.", "parameters": {"type": "object"}},
}
HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def parsed(hint: str = "", **fields: Any) -> ChatCall:
    body = decode(msgspec.json.encode(HELLO | fields), ChatBody)
    return parse_chat(body, turn_id="t", hint=hint, defaults=SamplingParams(temperature=0.5))


def test_what_a_client_leaves_out_is_the_model_s_or_the_context_s() -> None:
    sampling = parsed().request.sampling
    assert sampling == SamplingParams(temperature=0.5, max_tokens=MAX_OUTPUT_TOKENS)
    assert parsed(max_tokens=1 << 40).request.sampling.max_tokens == MAX_OUTPUT_TOKENS
    both = parsed(max_tokens=5, max_completion_tokens=7, temperature=0, top_k=-1, stop="x")
    assert both.request.sampling == SamplingParams(temperature=0, max_tokens=7)
    assert both.request.text.stop == ("x",)
    assert parsed(seed=-1).request.sampling.seed == (1 << 63) - 1
    assert parsed(logit_bias={"7": 3}).request.sampling.logit_bias == ((7, 3.0),)
    assert parsed().request.on_disconnect == "cancel"


def test_parts_are_joined_and_an_answer_may_be_empty() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": t} for t in "abc"], "name": "x"},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    said = ("", "", "No.")
    expected = (Message("system", "abc"), *(Message("assistant", text) for text in said))
    assert parsed(messages=messages).request.input == ChatInput(expected, is_whole=True)


@pytest.mark.parametrize(
    ("fields", "hint", "expected"),
    [
        ({}, "", (None, "", False)),
        ({}, "header", (None, "header", False)),
        ({"prompt_cache_key": "key"}, "header", (None, "key", False)),
        ({"session_id": "id", "prompt_cache_key": "key"}, "header", ("id", "key", False)),
        ({"session_params": {"id": "id", "rid": "r"}}, "", ("id", "", True)),
        ({"session_id": "", "prompt_cache_key": ""}, "", (None, "", False)),
    ],
)
def test_who_names_a_session(
    fields: dict[str, Any], hint: str, expected: tuple[str | None, str, bool]
) -> None:
    call = parsed(hint, **fields)
    assert (call.session, call.hint, call.is_append) == expected
    assert isinstance(call.request.input, ChatInput)
    assert call.request.input.is_whole != call.is_append


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "weather"}]},
        {"function_call": "auto"},
        {"ebnf": "root ::= 'a'"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"cache_salt": "mine"},
        {"modalities": ["text", "audio"]},
        {"bad_words": ["no"]},
        {"allowed_token_ids": [1]},
        {"logits_processors": ["x"]},
        {"prompt_logprobs": 1},
        {"return_token_ids": True},
        {"stop_regex": "a+"},
        {"structural_tag": "{}"},
        {"truncate_prompt_tokens": 8},
        {"use_beam_search": True},
    ],
)
def test_what_would_change_the_answer_is_refused_by_its_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOperation) as refused:
        parsed(**fields)
    assert refused.value.param == next(iter(fields))


def test_what_changes_nothing_is_taken() -> None:
    empty = {"tools": [], "tool_choice": "auto", "n": 1, "functions": None, "modalities": []}
    assert parsed(**empty, best_of=0, echo=False).request.input == parsed().request.input
    assert parsed(stop="x", include_stop_str_in_output=True).request.text.keep_stop


def test_tools_and_calls_are_those_of_the_turn() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "So."},
        {"role": "tool", "content": [{"type": "text", "text": "Rain."}], "tool_call_id": "c"},
    ]
    chat = parsed(tools=[TOOL], messages=messages, parallel_tool_calls=True, strict=True)
    (tool,) = chat.input.tools
    assert json.loads(tool) == TOOL
    calls = (ToolCall("c", "weather", "{}"),)
    assert chat.input.messages[1:] == (
        Message("assistant", "", tool_calls=calls, reasoning="So."),
        Message("tool", "Rain.", tool_call_id="c"),
    )
    assert chat.request.text.may_call
    assert not chat.request.text.is_one_call
    assert parsed(tools=[TOOL], parallel_tool_calls=False).request.text.is_one_call
    assert not parsed(tools=[TOOL], tool_choice="none").request.text.may_call
    assert parsed(tools=[TOOL], tool_choice="auto").request.text.must_call is None
    assert parsed(tools=[TOOL], tool_choice="required").request.text.must_call == ""
    named = {"type": "function", "function": {"name": "weather"}}
    assert parsed(tools=[TOOL], tool_choice=named).request.text.must_call == "weather"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [TOOL | {"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "function_call": {"name": "x"}}]},
            "messages[0].function_call",
        ),
    ],
)
def test_malformed_tools_and_calls_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedOperation)) as refused:
        parsed(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("name", ["replace", "drop_previous_output", "offset"])
def test_a_history_that_only_grows_is_not_cut(name: str) -> None:
    with pytest.raises(UnsupportedOperation, match=name):
        parsed(session_params={"id": "s", name: 3 if name == "offset" else True})


def test_two_names_of_different_kinds_contradict() -> None:
    with pytest.raises(InvalidRequest, match="cannot both be set"):
        parsed(session_id="a", session_params={"id": "b"})


@pytest.mark.parametrize("name", ["a", "A-Z_a.z:0", "x" * 64])
def test_a_name_that_is_a_session_id_is_one(name: str) -> None:
    assert session_id_of(name) == name


@pytest.mark.parametrize("name", ["", "new", ".", "..", "a b", "ä", "x" * 65, "a/b", "a\n"])
def test_any_other_name_stands_for_one(name: str) -> None:
    session_id = session_id_of(name)
    assert session_id.startswith("key_")
    assert session_id_of(session_id) == session_id != session_id_of(name + "x")


def test_a_logprob_names_its_token_and_says_its_bytes_where_they_are_text() -> None:
    texts = {1: "ab", 2: "\ufffd", 3: "é"}
    head = AnswerHead("m", "s", 0, texts.__getitem__)
    answer = ChatAnswer(parsed(), head, usage=CallUsage())
    value = TokenLogprob(1, -0.5, ((2, -1.0), (3, float("-inf"))))
    assert msgspec.to_builtins(answer.logprob_body(value)) == {
        "token": "ab",
        "logprob": -0.5,
        "bytes": (97, 98),
        "top_logprobs": (
            {"token": "\ufffd", "logprob": -1.0, "bytes": None},
            {"token": "é", "logprob": -9999.0, "bytes": (195, 169)},
        ),
    }
    assert answer.logprob_body(TokenLogprob(1, None)).logprob == -9999.0
