"""Build the answer to a chat completion: the whole of it, or its chunks."""

from __future__ import annotations

from dataclasses import dataclass
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
from session_server.protocol.told import Told
from session_server.protocol.tools import (
    ToolCallBody,
    ToolCallDeltaBody,
    call_bodies,
    call_delta_bodies,
)

FinishReason = Literal["stop", "length", "tool_calls"]

LEAST_LOGPROB: Final = -9999.0
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
    """The answer. One that only calls has no content."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: tuple[ToolCallBody, ...] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished completion; `session_id` names the session that holds the conversation, and
    `durable` says whether the turn is on disk; null for a session that is not stored."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: ChatUsage
    system_fingerprint: None = None
    session_id: str
    durable: bool | None
    timings: ChatTimings | None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDeltaBody, ...] = ()


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed completion. `session_id` is in the first and in the last with a
    choice, `durable` in the last one."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    system_fingerprint: None = None
    usage: ChatUsage | msgspec.UnsetType | None = msgspec.UNSET
    session_id: str | msgspec.UnsetType = msgspec.UNSET
    durable: bool | msgspec.UnsetType | None = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Hold what all chunks of a call have in common. `created_s` is wall-clock time, `token_text`
    gives the text of a token id."""

    model: str
    session_id: str
    created_s: int
    token_text: TokenText


class CallUsage:
    """Count the tokens of a call so far: each prompt once, and all answers."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], TokenUsage] = {}

    def note(self, place: tuple[int, int], usage: TokenUsage) -> None:
        """Note the tokens of one answer: the number of its prompt, and its own among the choices
        of that."""
        self._counts[place] = usage

    def total(self) -> TokenUsage:
        """Return the tokens of all."""
        of_prompts = [usage for (_, choice), usage in self._counts.items() if choice == 0]
        return TokenUsage(
            sum(usage.input_tokens for usage in of_prompts),
            sum(usage.cached_tokens for usage in of_prompts),
            sum(usage.output_tokens for usage in self._counts.values()),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in self._counts.values()),
        )


class CountedAnswer:
    """Count the tokens of one answer to a call, and what its reader was told.

    All answers of a call share `usage`, and `index` counts them: `num_choices` of each prompt.
    """

    def __init__(self, usage: CallUsage, *, index: int, num_choices: int) -> None:
        self.index = index
        self._place = divmod(index, num_choices)
        self._call_usage = usage
        self._usage = TokenUsage()
        self._told = Told()

    def note_progress(self, progress: TurnProgress) -> None:
        """Note the size of the context, for the usage so far."""
        self.note_usage(
            msgspec.structs.replace(
                self._usage, input_tokens=progress.total, cached_tokens=progress.cached
            )
        )

    def note_delta(self, delta: TurnDelta) -> None:
        """Note what a chunk tells."""
        self._told.note(delta)
        num_tokens = self._usage.output_tokens + len(delta.token_ids)
        self.note_usage(msgspec.structs.replace(self._usage, output_tokens=num_tokens))

    def note_usage(self, usage: TokenUsage) -> None:
        """Note the tokens so far."""
        self._usage = usage
        self._call_usage.note(self._place, usage)

    def unsent(self, end: TurnEnd) -> TurnDelta:
        """Return what of the answer no chunk holds, for a reader that missed deltas."""
        return self._told.unsent(end)


class ChatAnswer(CountedAnswer):
    """Build one answer to a call, whole or in chunks."""

    def __init__(
        self, call: ChatCall, head: AnswerHead, *, usage: CallUsage, index: int = 0
    ) -> None:
        super().__init__(usage, index=index, num_choices=call.num_choices)
        self._call = call
        self._head = head

    def choice(self, end: TurnEnd, *, logprobs: ChatLogprobs | None) -> ChatChoice:
        """Return the whole answer of a turn."""
        self.note_usage(end.outcome.usage)
        return ChatChoice(
            index=self.index,
            message=_message(end.outcome),
            logprobs=logprobs,
            finish_reason=finish_reason(end),
        )

    def scored(self, end: TurnEnd) -> tuple[TokenLogprob, ...]:
        """Return the scores of the whole answer."""
        return end.outcome.logprobs

    def opening(self) -> tuple[ChatChunk]:
        """Return the first chunk, which names the role and the session."""
        delta = ChatDelta(role="assistant", content="")
        return (self._chunk(delta, session_id=self._head.session_id),)

    def add(self, delta: TurnDelta, *, logprobs: ChatLogprobs | None) -> ChatChunk:
        """Return the chunk of what is new; its tokens may have no text yet."""
        self.note_delta(delta)
        is_silent = not (delta.text or delta.reasoning or delta.tool_calls)
        new = ChatDelta(
            content=delta.text if delta.text or is_silent else None,
            reasoning_content=delta.reasoning,
            tool_calls=call_delta_bodies(delta.tool_calls),
        )
        return self._chunk(new, logprobs=logprobs)

    def closing(self, end: TurnEnd) -> ChatChunk:
        """Return the chunk that says why the answer ended."""
        self.note_usage(end.outcome.usage)
        last = self._chunk(
            ChatDelta(), finish_reason=finish_reason(end), session_id=self._head.session_id
        )
        return msgspec.structs.replace(last, durable=end.outcome.is_durable)

    def logprob_body(self, value: TokenLogprob) -> TokenLogprobBody:
        """Return the wire form of one token's logprob."""
        top = tuple(TopLogprobBody(**self._token(*pair)) for pair in value.top)
        logprob = LEAST_LOGPROB if value.logprob is None else value.logprob
        return TokenLogprobBody(**self._token(value.token_id, logprob), top_logprobs=top)

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._head.token_text(token_id)
        # A token may be a piece of a character: its bytes are then not those of its text.
        encoded = None if "\ufffd" in text else tuple(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": encoded}

    def _chunk(
        self,
        delta: ChatDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: FinishReason | None = None,
        session_id: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> ChatChunk:
        usage: ChatUsage | msgspec.UnsetType | None = msgspec.UNSET
        if self._call.options.continuous_usage_stats:
            usage = usage_body(self._call_usage.total())
        elif self._call.options.include_usage:
            usage = None
        choice = ChunkChoice(
            index=self.index, delta=delta, logprobs=logprobs, finish_reason=finish_reason
        )
        return ChatChunk(
            id=self._call.request.turn_id,
            object="chat.completion.chunk",
            created=self._head.created_s,
            model=self._head.model,
            choices=(choice,),
            usage=usage,
            session_id=session_id,
        )


def chat_completion(
    call: ChatCall,
    head: AnswerHead,
    choices: tuple[ChatChoice, ...],
    *,
    first: TurnEnd,
    usage: CallUsage,
) -> ChatCompletion:
    """Return the whole of a completion; `first` is the end of its first answer."""
    return ChatCompletion(
        id=call.request.turn_id,
        object="chat.completion",
        created=head.created_s,
        model=head.model,
        choices=choices,
        usage=usage_body(usage.total()),
        session_id=head.session_id,
        durable=first.outcome.is_durable,
        timings=_timings(first.outcome),
    )


def usage_chunk(call: ChatCall, head: AnswerHead, usage: CallUsage) -> ChatChunk | None:
    """Return the last chunk, with the usage and no choice; None if it was not asked for."""
    if not call.options.include_usage:
        return None
    return ChatChunk(
        id=call.request.turn_id,
        object="chat.completion.chunk",
        created=head.created_s,
        model=head.model,
        choices=(),
        usage=usage_body(usage.total()),
    )


def _message(outcome: Outcome) -> AssistantMessage:
    calls = call_bodies(outcome.tool_calls)
    return AssistantMessage(
        role="assistant",
        content=outcome.text or (None if calls else ""),
        tool_calls=calls or msgspec.UNSET,
        reasoning_content=outcome.reasoning or msgspec.UNSET,
    )


def finish_reason(end: TurnEnd) -> FinishReason:
    """Return why an answer ended. One that somebody canceled was cut, like one that was too
    long."""
    match end:
        case TurnCompleted(reason=reason, outcome=outcome):
            return "tool_calls" if reason == "stop" and outcome.tool_calls else reason
        case TurnCancelled() | TurnFailedEntry():
            return "length"
        case _:
            assert_never(end)


def usage_body(usage: TokenUsage) -> ChatUsage:
    """Return the wire form of token counts."""
    return ChatUsage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=CachedTokens(
            cached_tokens=usage.cached_tokens, cache_write_tokens=usage.cache_write_tokens
        ),
        completion_tokens_details=ReasoningTokens(reasoning_tokens=usage.reasoning_tokens),
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
