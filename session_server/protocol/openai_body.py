"""What the bodies of OpenAI's completions have in common: sampling, streams, open sessions."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_OUTPUT_TOKENS
from session_server.protocol.grammars import GrammarFields
from session_server.protocol.messages import (
    MAX_STOP_STRINGS,
    Fraction,
    LogitBias,
    NumTokens,
    Penalty,
    Priority,
    SamplingBody,
    StopString,
    StopTokenIds,
    Temperature,
    TopK,
    TopP,
    doc,
)

MAX_CHOICES: Final = 16
MAX_NAME_CHARS: Final = 256

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a stream. `include_usage`: a last chunk with the usage and no choice;
    `continuous_usage_stats`: the usage so far with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatSessionParams(msgspec.Struct, frozen=True, kw_only=True):
    """The session that is appended to, under SGLang's names. `rid` is accepted and has no meaning:
    a session has one history, which only grows."""

    id: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class OpenAIBody(GrammarFields, frozen=True, kw_only=True):
    """What the bodies of completions have in common."""

    model: Annotated[Name, doc("the one served, or nothing")] | None = None
    stream: Annotated[bool, doc("answer in chunks")] | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[NumTokens, doc("before the answer may end by itself")] | None = None
    temperature: Annotated[Temperature, doc("0 is greedy and exact")] | None = None
    top_p: TopP | None = None
    top_k: Annotated[TopK, doc("0 and -1: all")] | None = None
    min_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    seed: (
        Annotated[
            int,
            Meta(ge=-(1 << 63), le=(1 << 63) - 1, description="the same seed, the same answer"),
        ]
        | None
    ) = None
    logit_bias: LogitBias | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: Annotated[bool, doc("do not end at the model's end tokens")] | None = None
    skip_special_tokens: (
        Annotated[bool, doc("leave control tokens out of the text; absent: true")] | None
    ) = None
    n: (
        Annotated[
            int, Meta(ge=1, le=MAX_CHOICES, description="answers; the prompt is computed once")
        ]
        | None
    ) = None
    priority: Annotated[Priority, doc("as in a turn of the native protocol")] | None = None
    session_params: Annotated[ChatSessionParams, doc("append to this open session")] | None = None
    include_stop_str_in_output: Annotated[bool, doc("leave the stop string in the text")] | None = (
        None
    )


def appended_to(params: ChatSessionParams) -> str:
    """Return the session that is appended to. Raises UnsupportedOperation."""
    for name in ("offset", "replace", "drop_previous_output"):
        if getattr(params, name):
            raise UnsupportedOperation(
                f"{name} is not supported: new input is appended.", param=f"session_params.{name}"
            )
    return params.id


def sampling_of(
    body: OpenAIBody, *, max_tokens: int, logprobs: bool | None, top_logprobs: int | None
) -> SamplingBody:
    """Return the sampling options under our names. Raises InvalidRequest."""
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest("min_tokens is above max_tokens.", param="min_tokens")
    same = {
        name: getattr(body, name)
        for name in SamplingBody.__struct_fields__
        if name in OpenAIBody.__struct_fields__
    }
    same["json_schema"] = same["regex"] = None  # `grammars.of_body` has read them
    same["max_tokens"] = min(max_tokens, MAX_OUTPUT_TOKENS)
    same["logprobs"], same["top_logprobs"] = logprobs, top_logprobs
    same["keep_stop"] = body.include_stop_str_in_output
    if body.seed is not None:
        same["seed"] = body.seed % (1 << 63)
    return SamplingBody(**same)
