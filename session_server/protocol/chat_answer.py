"""Build the answer to a chat completion: the whole of it, or its chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, assert_never

import msgspec

from session_server.core.sampling import TokenLogprob
from session_server.core.session_events import (
    Outcome,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnDelta,
    TurnEnd,
    TurnFailedEntry,
    TurnProgress,
)
from session_server.protocol.chat_completions import ChatCall
from session_server.protocol.cumulative_answer import TokenText

FinishReason = Literal["stop", "length"]

_LEAST_LOGPROB: Final = -9999.0
"""What OpenAI's API says for a token that cannot be; JSON has no infinity."""


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
