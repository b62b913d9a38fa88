"""What the bodies of OpenAI's completions have in common: sampling, streams, open sessions."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_OUTPUT_TOKENS, Grammar
from session_server.protocol.grammars import (
    Choices,
    GrammarText,
    JsonSchema,
    StructuredOutputs,
    of_choices,
    of_lark,
    of_regex,
    of_response_format,
    of_schema,
    of_structured_outputs,
    only,
)
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
NumTokensAsked = Annotated[int, Meta(ge=1, le=1 << 53)]
NotOffered = Annotated[Any, doc("not offered")]


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


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is sampled, in every dialect of OpenAI's; absent or null: as the model's
    default."""

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
    priority: Annotated[Priority, doc("as in a turn of the native protocol")] | None = None


class OpenAIBody(SamplingFields, frozen=True, kw_only=True):
    """What the bodies of completions have in common. What the answer must match has names of
    OpenAI, vLLM and SGLang: one at most."""

    response_format: (
        Annotated[dict[str, Any], doc("`text`, `json_object` or `json_schema`")] | None
    ) = None
    structured_outputs: Annotated[StructuredOutputs, doc("vLLM's name of the same")] | None = None
    guided_json: Annotated[JsonSchema, doc("its older names")] | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: Annotated[GrammarText, doc("in Lark's syntax")] | None = None
    json_schema: Annotated[JsonSchema, doc("SGLang's names of the same")] | None = None
    regex: GrammarText | None = None
    model: Annotated[Name, doc("the one served, or nothing")] | None = None
    stream: Annotated[bool, doc("answer in chunks")] | None = None
    stream_options: StreamOptions | None = None
    n: (
        Annotated[
            int, Meta(ge=1, le=MAX_CHOICES, description="answers; the prompt is computed once")
        ]
        | None
    ) = None
    session_params: Annotated[ChatSessionParams, doc("append to this open session")] | None = None
    include_stop_str_in_output: Annotated[bool, doc("leave the stop string in the text")] | None = (
        None
    )
    allowed_token_ids: NotOffered = None
    bad_words: NotOffered = None
    cache_salt: NotOffered = None
    ebnf: NotOffered = None
    logits_processors: NotOffered = None
    prompt_logprobs: NotOffered = None
    return_token_ids: NotOffered = None
    stop_regex: NotOffered = None
    structural_tag: NotOffered = None
    truncate_prompt_tokens: NotOffered = None
    use_beam_search: NotOffered = None


def refuse_unsupported(body: msgspec.Struct, **is_wrong: bool) -> None:
    """Refuse by name what would change the answer: what is `NotOffered`, unless it is empty, and
    what is wrong besides. Raises UnsupportedOperation."""
    is_wrong |= {name: bool(getattr(body, name)) for name in _not_offered(type(body))}
    for name, refused in is_wrong.items():
        if refused:
            raise UnsupportedOperation(f"{name} is not supported here.", param=name)


@cache
def _not_offered(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(each.name for each in msgspec.structs.fields(kind) if each.type == NotOffered)


def grammar_of(body: OpenAIBody) -> Grammar | None:
    """Return what the answer must match; None if it may be anything.

    Raises:
        InvalidRequest: it is malformed, or there are several.
    """
    return only(
        {
            "response_format": of_response_format(body.response_format),
            "structured_outputs": of_structured_outputs(body.structured_outputs),
            "guided_json": of_schema(body.guided_json, "guided_json"),
            "guided_regex": of_regex(body.guided_regex, "guided_regex"),
            "guided_choice": of_choices(body.guided_choice, "guided_choice"),
            "guided_grammar": of_lark(body.guided_grammar, "guided_grammar"),
            "json_schema": of_schema(body.json_schema, "json_schema"),
            "regex": of_regex(body.regex, "regex"),
        }
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
    fields: SamplingFields, *, max_tokens: int, param: str = "max_tokens", **others: Any
) -> SamplingBody:
    """Return the sampling options under our names.

    Args:
        fields: as received.
        max_tokens: of the answer, whose name is `param`.
        others: options that are no `SamplingFields`.

    Raises:
        InvalidRequest: `min_tokens` is above `max_tokens`.
    """
    if (fields.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"min_tokens is above {param}.", param="min_tokens")
    same = {
        name: getattr(fields, name)
        for name in SamplingFields.__struct_fields__
        if name in SamplingBody.__struct_fields__
    }
    if fields.seed is not None:
        same["seed"] = fields.seed % (1 << 63)
    return SamplingBody(**same, max_tokens=min(max_tokens, MAX_OUTPUT_TOKENS), **others)
