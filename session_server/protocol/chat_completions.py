"""Translate OpenAI's Chat Completions: its bodies to turns, and turns to its answers and chunks.

A client sends the whole conversation with every call. It names the conversation with `session_id`,
`prompt_cache_key` or a header, or leaves it unnamed. With `session_params` it sends new messages
only. Unknown fields are ignored, as clients of many servers send them; what would change the answer
and is not offered is refused by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, assert_never

import msgspec
from msgspec import Meta

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_OUTPUT_TOKENS, SamplingParams, TokenLogprob
from session_server.core.session_events import (
    ChatInput,
    Message,
    Outcome,
    Role,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnProgress,
    TurnRequest,
)
from session_server.protocol.cumulative_answer import TokenText
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

FinishReason = Literal["stop", "length"]
NotOffered = Annotated[Any, doc("not offered")]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
NumTokensAsked = Annotated[int, Meta(ge=1, le=1 << 53)]

_SESSION_ID: Final = re.compile(r"(?!new$|\.\.?$)[A-Za-z0-9_.:\-]{1,64}", re.ASCII)
_LEAST_LOGPROB: Final = -9999.0
"""What OpenAI's API says for a token that cannot be; JSON has no infinity."""


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


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompt: what was not computed again, and what was."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Of the completion."""

    reasoning_tokens: int = 0


class ChatUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; the prompt is the whole context."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens = ReasoningTokens()


class ChatTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and milliseconds, under llama.cpp's names."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


class TopLogprobBody(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was likely. `bytes` is null for a piece of a character."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenLogprobBody(TopLogprobBody, frozen=True, kw_only=True):
    """A token of the answer, and those that were most likely in its place."""

    top_logprobs: tuple[TopLogprobBody, ...]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of the tokens of a choice; `content` may be encoded already."""

    content: tuple[TokenLogprobBody, ...]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished completion; `session_id` names the session that holds the conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: ChatUsage
    system_fingerprint: None = None
    session_id: str
    timings: ChatTimings | None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed completion. `session_id` is in the first and in the last with a
    choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    system_fingerprint: None = None
    usage: ChatUsage | msgspec.UnsetType | None = msgspec.UNSET
    session_id: str | msgspec.UnsetType = msgspec.UNSET


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


class ChatAnswer:
    """Build the answer to one call, whole or in chunks.

    `token_text` gives the text of a token id; `created_s` is wall-clock time.
    """

    def __init__(
        self, call: ChatCall, *, model: str, session_id: str, created_s: int, token_text: TokenText
    ) -> None:
        self._call = call
        self._model = model
        self._session_id = session_id
        self._created_s = created_s
        self._token_text = token_text
        self._usage = TokenUsage()
        self._num_chars = 0
        self._num_scores = 0

    def completion(self, end: TurnEnd, *, logprobs: ChatLogprobs | None) -> ChatCompletion:
        """Return the whole answer of a turn."""
        outcome = end.outcome
        choice = ChatChoice(
            index=0,
            message=AssistantMessage(role="assistant", content=outcome.text),
            logprobs=logprobs,
            finish_reason=finish_reason(end),
        )
        return ChatCompletion(
            id=self._call.request.turn_id,
            object="chat.completion",
            created=self._created_s,
            model=self._model,
            choices=(choice,),
            usage=_usage_body(outcome.usage),
            session_id=self._session_id,
            timings=_timings(outcome),
        )

    def opening(self) -> ChatChunk:
        """Return the first chunk, which names the role and the session."""
        delta = ChatDelta(role="assistant", content="")
        return self._chunk(delta, session_id=self._session_id)

    def add(self, delta: TurnDelta, *, logprobs: ChatLogprobs | None) -> ChatChunk:
        """Return the chunk of new text; its tokens may have none yet."""
        self._num_chars += len(delta.text)
        self._num_scores += len(delta.logprobs)
        usage, num_new = self._usage, len(delta.token_ids)
        num_outputs = usage.output_tokens + num_new
        self._usage = msgspec.structs.replace(usage, output_tokens=num_outputs)
        return self._chunk(ChatDelta(content=delta.text), logprobs=logprobs)

    def note_progress(self, progress: TurnProgress) -> None:
        """Note the size of the context, for the usage so far."""
        self._usage = msgspec.structs.replace(
            self._usage, input_tokens=progress.total, cached_tokens=progress.cached
        )

    def unsent(self, end: TurnEnd) -> TurnDelta:
        """Return what of the answer no chunk holds, for a reader that missed deltas."""
        outcome = end.outcome
        return TurnDelta(
            turn_id=end.turn_id,
            item_id=outcome.item_id,
            text=outcome.text[self._num_chars :],
            token_ids=(),
            logprobs=outcome.logprobs[self._num_scores :],
        )

    def closing(self, end: TurnEnd) -> Iterator[ChatChunk]:
        """Yield the last chunks: why the answer ended, and the usage if it was asked for."""
        self._usage = end.outcome.usage
        yield self._chunk(
            ChatDelta(), finish_reason=finish_reason(end), session_id=self._session_id
        )
        if self._call.include_usage:
            yield msgspec.structs.replace(
                self._chunk(ChatDelta()), choices=(), usage=_usage_body(self._usage)
            )

    def logprob_body(self, value: TokenLogprob) -> TokenLogprobBody:
        """Return the wire form of one token's logprob."""
        top = tuple(TopLogprobBody(**self._token(*pair)) for pair in value.top)
        logprob = _LEAST_LOGPROB if value.logprob is None else value.logprob
        return TokenLogprobBody(**self._token(value.token_id, logprob), top_logprobs=top)

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        # A token may be a piece of a character: its bytes are then not those of its text.
        encoded = None if "\ufffd" in text else tuple(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": encoded}

    def _chunk(
        self,
        delta: ChatDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: FinishReason | None = None,
        session_id: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> ChatChunk:
        usage: ChatUsage | msgspec.UnsetType | None = msgspec.UNSET
        if self._call.continuous_usage:
            usage = _usage_body(self._usage)
        elif self._call.include_usage:
            usage = None
        choice = ChunkChoice(index=0, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatChunk(
            id=self._call.request.turn_id,
            object="chat.completion.chunk",
            created=self._created_s,
            model=self._model,
            choices=(choice,),
            usage=usage,
            session_id=session_id,
        )


def finish_reason(end: TurnEnd) -> FinishReason:
    """Return why an answer ended. One that somebody canceled was cut, like one that was too
    long."""
    match end:
        case TurnCompleted(reason=reason):
            return reason
        case TurnCancelled() | TurnFailedEntry():
            return "length"
        case _:
            assert_never(end)


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


def _usage_body(usage: TokenUsage) -> ChatUsage:
    return ChatUsage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=CachedTokens(
            cached_tokens=usage.cached_tokens, cache_write_tokens=usage.cache_write_tokens
        ),
    )


def _timings(outcome: Outcome) -> ChatTimings | None:
    if outcome.timings is None:
        return None
    return ChatTimings(
        cache_n=outcome.usage.cached_tokens,
        prompt_n=outcome.usage.cache_write_tokens,
        prompt_ms=outcome.timings.prefill_ms,
        predicted_n=outcome.usage.output_tokens,
        predicted_ms=outcome.timings.decode_ms,
    )
