"""Translate the bodies of OpenAI's Chat Completions to turns.

A client sends the whole conversation with every call. It names a session with `session_id`, or
none; then `prompt_cache_key` or a header tells conversations of the same words apart. With
`session_params` it sends new messages only. Unknown fields are ignored, as clients of many servers
send them; what would change the answer and is not offered is refused by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_OUTPUT_TOKENS, SamplingParams
from session_server.core.session_events import (
    ChatInput,
    Message,
    Role,
    TurnRequest,
)
from session_server.protocol.messages import (
    MAX_STOP_STRINGS,
    Content,
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
    TopLogprobs,
    TopP,
    doc,
    sampling_params,
    text_options,
)

MAX_CHAT_MESSAGES: Final = 4096
MAX_CHAT_PARTS: Final = 1024
MAX_NAME_CHARS: Final = 256

NotOffered = Annotated[Any, doc("not offered")]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
NumTokensAsked = Annotated[int, Meta(ge=1, le=1 << 53)]

_SESSION_ID: Final = re.compile(r"(?!new$|\.\.?$)[A-Za-z0-9_.:\-]{1,64}", re.ASCII)


class ChatTextPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A part of a message's content. Parts are joined without a separator."""

    text: Content


class RefusalPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A part of an answer that said no."""

    text: Content = msgspec.field(name="refusal")


ChatPart = ChatTextPart | RefusalPart


class ChatMessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: Role
    content: (
        Content | Annotated[list[ChatPart], Meta(min_length=1, max_length=MAX_CHAT_PARTS)] | None
    ) = None
    tool_calls: Any = None
    function_call: Any = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a stream. `include_usage`: a last chunk with the usage and no choice;
    `continuous_usage_stats`: the usage so far with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatSessionParams(msgspec.Struct, frozen=True, kw_only=True):
    """The session that `messages` are appended to, under SGLang's names. `rid` is accepted and has
    no meaning: a session has one history, which only grows."""

    id: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class ChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    model: Annotated[Name, doc("the one served, or nothing")] | None = None
    messages: Annotated[
        list[ChatMessageBody],
        Meta(min_length=1, max_length=MAX_CHAT_MESSAGES, description="the whole conversation"),
    ]
    stream: Annotated[bool, doc("answer in chunks")] | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: (
        Annotated[NumTokensAsked, doc("of the answer; absent: what the context leaves")] | None
    ) = None
    max_tokens: Annotated[NumTokensAsked, doc("the older name of the same")] | None = None
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
    logprobs: bool | None = None
    top_logprobs: Annotated[TopLogprobs, doc("needs `logprobs`")] | None = None
    n: Annotated[int, Meta(ge=1, le=128, description="only 1 is offered")] | None = None
    priority: Annotated[Priority, doc("as in a turn of the native protocol")] | None = None
    session_id: Annotated[Name, doc("the session of this conversation")] | None = None
    prompt_cache_key: (
        Annotated[Name, doc("without `session_id`: conversations of other keys are others")] | None
    ) = None
    session_params: (
        Annotated[ChatSessionParams, doc("append `messages` to this open session")] | None
    ) = None
    include_stop_str_in_output: Annotated[bool, doc("leave the stop string in the text")] | None = (
        None
    )
    response_format: Annotated[dict[str, Any], doc("only `text` is offered")] | None = None
    modalities: Annotated[list[str], doc("only `text` is offered")] | None = None
    add_generation_prompt: Annotated[bool, doc("only true is offered")] | None = None
    tools: Annotated[Any, doc("not offered yet")] = None
    tool_choice: Annotated[Any, doc("only `auto` and `none` are offered")] = None
    functions: NotOffered = None
    function_call: NotOffered = None
    audio: NotOffered = None
    bad_words: NotOffered = None
    best_of: NotOffered = None
    cache_salt: NotOffered = None
    chat_template: NotOffered = None
    chat_template_kwargs: NotOffered = None
    continue_final_message: NotOffered = None
    documents: NotOffered = None
    ebnf: NotOffered = None
    echo: NotOffered = None
    guided_choice: NotOffered = None
    guided_grammar: NotOffered = None
    guided_json: NotOffered = None
    guided_regex: NotOffered = None
    json_schema: NotOffered = None
    regex: NotOffered = None
    structured_outputs: NotOffered = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """Hold one decoded request.

    `session`: the client's name for the session, None where it names none. `hint`: what such a
    call says about its conversation, which other conversations may share. `is_append`: the session
    is open, and the messages are new.
    """

    request: TurnRequest
    session: str | None
    hint: str
    is_append: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages given."""
        assert isinstance(self.request.input, ChatInput), "parse_chat made it"
        return self.request.input.messages


def parse_chat(body: ChatBody, *, turn_id: str, hint: str, defaults: SamplingParams) -> ChatCall:
    """Translate a request.

    Args:
        body: as received.
        turn_id: the turn's id, and the completion's.
        hint: the name that a header gave the conversation, or "".
        defaults: the model's sampling.

    Raises:
        InvalidRequest: it contradicts itself, or asks for what is not offered.
    """
    _refuse_unsupported(body)
    if body.session_id is not None and body.session_params is not None:
        raise InvalidRequest(
            "session_id and session_params cannot both be set.", param="session_params"
        )
    appended_to = None if body.session_params is None else _appended_to(body.session_params)
    sampling = _sampling(body)
    # An answer ends by itself or with the context unless the client says otherwise.
    unbounded = msgspec.structs.replace(defaults, max_tokens=MAX_OUTPUT_TOKENS)
    request = TurnRequest(
        turn_id=turn_id,
        input=ChatInput(_messages(body.messages), is_whole=appended_to is None),
        sampling=sampling_params(sampling, defaults=unbounded),
        text=text_options(sampling),
        priority=body.priority or 0,
        on_disconnect="cancel",
    )
    options = body.stream_options or StreamOptions()
    return ChatCall(
        request=request,
        session=appended_to or body.session_id or None,
        hint=body.prompt_cache_key or hint,
        is_append=appended_to is not None,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )


def session_id_of(name: str) -> str:
    """Return the id of the session that a client's name stands for."""
    if _SESSION_ID.fullmatch(name):
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16)
    return f"key_{digest.hexdigest()}"


def _appended_to(params: ChatSessionParams) -> str:
    for name in ("offset", "replace", "drop_previous_output"):
        if getattr(params, name):
            raise UnsupportedOperation(
                f"{name} is not supported: messages are appended.", param=f"session_params.{name}"
            )
    return params.id


_NOT_OFFERED: Final = (
    "tools",
    "functions",
    "function_call",
    "audio",
    "bad_words",
    "best_of",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "ebnf",
    "echo",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "json_schema",
    "regex",
    "structured_outputs",
)
"""Fields that other servers read and that would change the answer; empty ones change nothing."""


def _refuse_unsupported(body: ChatBody) -> None:
    """Refuse by name what would change the answer. Raises UnsupportedOperation."""
    wrong = {
        "response_format": (body.response_format or {}).get("type", "text") != "text",
        "modalities": body.modalities not in (None, [], ["text"]),
        "add_generation_prompt": body.add_generation_prompt is False,
        "tool_choice": body.tool_choice not in (None, "auto", "none"),
        "n": body.n not in (None, 1),
    } | {name: bool(getattr(body, name)) for name in _NOT_OFFERED}
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise UnsupportedOperation(f"{name} is not supported here.", param=name)


def _messages(bodies: Sequence[ChatMessageBody]) -> tuple[Message, ...]:
    for index, body in enumerate(bodies):
        for name in ("tool_calls", "function_call"):
            if getattr(body, name):
                raise UnsupportedOperation(
                    f"{name} is not supported here.", param=f"messages[{index}].{name}"
                )
        if body.content is None and body.role != "assistant":
            raise InvalidRequest("A message needs content.", param=f"messages[{index}].content")
    return tuple(Message(role=body.role, content=_text_of(body.content)) for body in bodies)


def _text_of(content: str | list[ChatPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _sampling(body: ChatBody) -> SamplingBody:
    """Return the sampling options under our names. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    max_tokens = body.max_completion_tokens or body.max_tokens or MAX_OUTPUT_TOKENS
    if (body.min_tokens or 0) > max_tokens:
        raise InvalidRequest("min_tokens is above max_tokens.", param="min_tokens")
    same = {
        name: getattr(body, name)
        for name in SamplingBody.__struct_fields__
        if name in ChatBody.__struct_fields__
    }
    same["max_tokens"] = min(max_tokens, MAX_OUTPUT_TOKENS)
    same["keep_stop"] = body.include_stop_str_in_output
    if body.seed is not None:
        same["seed"] = body.seed % (1 << 63)
    return SamplingBody(**same)
