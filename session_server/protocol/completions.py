"""Translate the bodies of OpenAI's older Completions to turns of raw input, and back.

Each prompt runs in a session of its own, which closes with the call; with `session_params` it is
appended to an open one. What would change the answer and is not offered is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from session_server.core.errors import InvalidRequest
from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.core.session_events import (
    RawInput,
    TextInput,
    TokenInput,
    TurnDelta,
    TurnEnd,
    TurnRequest,
)
from session_server.protocol.chat_answer import (
    LEAST_LOGPROB,
    AnswerHead,
    CallUsage,
    ChatUsage,
    CountedAnswer,
    FinishReason,
    finish_reason,
    usage_body,
)
from session_server.protocol.messages import (
    MAX_INPUT_IDS,
    Content,
    TokenId,
    TopLogprobs,
    doc,
    sampling_params,
    text_options,
)
from session_server.protocol.openai_body import (
    MAX_CHOICES,
    NotOffered,
    OpenAIBody,
    StreamOptions,
    appended_to,
    grammar_of,
    refuse_unsupported,
    sampling_of,
)

MAX_ANSWERS: Final = 128
DEFAULT_MAX_TOKENS: Final = 16

Ids = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_INPUT_IDS)]
Prompts = (
    Content | Annotated[list[Content | TokenId | Ids], Meta(min_length=1, max_length=MAX_INPUT_IDS)]
)


class CompletionBody(OpenAIBody, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[
        Prompts, doc(f"a text, token ids, or several of either: {MAX_ANSWERS} answers in all")
    ]
    max_tokens: (
        Annotated[
            int, Meta(ge=0, le=1 << 53, description=f"of the answer; absent: {DEFAULT_MAX_TOKENS}")
        ]
        | None
    ) = None
    logprobs: Annotated[TopLogprobs, doc("of each token, and so many alternatives")] | None = None
    echo: Annotated[bool, doc("the prompt before the answer, and its logprobs")] | None = None
    best_of: (
        Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="only `n` is offered")] | None
    ) = None
    suffix: NotOffered = None
    session_id: Annotated[Any, doc("not offered: `session_params` appends")] = None


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """Hold one decoded request: a turn for each prompt. `session`: the open one that the only
    prompt is appended to."""

    id: str
    requests: tuple[TurnRequest, ...]
    session: str | None
    num_choices: int
    echo: bool
    stream: bool
    options: StreamOptions

    @property
    def sampling(self) -> SamplingParams:
        """Return the sampling of every answer."""
        return self.requests[0].sampling


def parse_completion(
    body: CompletionBody, *, completion_id: str, defaults: SamplingParams
) -> CompletionCall:
    """Translate a request. Raises InvalidRequest: it contradicts itself, or asks for what is not
    offered."""
    inputs = _inputs(body.prompt)
    num_choices = body.n or 1
    _check(body, len(inputs), num_choices)
    sampling_body = sampling_of(
        body,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs,
        keep_stop=body.include_stop_str_in_output,
    )
    held = msgspec.structs.replace(defaults, grammar=grammar_of(body))
    sampling = sampling_params(sampling_body, defaults=held)
    if body.echo and body.logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs_from=0)
    requests = (
        TurnRequest(
            turn_id=completion_id if len(inputs) == 1 else f"{completion_id}-{index}",
            input=given,
            sampling=sampling,
            text=text_options(sampling_body),
            priority=body.priority or 0,
            on_disconnect="cancel",
        )
        for index, given in enumerate(inputs)
    )
    return CompletionCall(
        id=completion_id,
        requests=tuple(requests),
        session=None if body.session_params is None else appended_to(body.session_params),
        num_choices=num_choices,
        echo=bool(body.echo),
        stream=bool(body.stream),
        options=body.stream_options or StreamOptions(),
    )


def _inputs(prompt: str | list[Any]) -> list[RawInput]:
    """Return the prompts. Raises InvalidRequest for a list of several kinds."""
    if isinstance(prompt, str):
        return [TextInput(prompt)]
    kinds = {type(each) for each in prompt}
    if len(kinds) > 1:
        raise InvalidRequest("A list of prompts is of one kind.", param="prompt")
    if kinds == {int}:
        return [TokenInput(tuple(prompt))]
    if kinds == {str}:
        return [TextInput(each) for each in prompt]
    return [TokenInput(tuple(each)) for each in prompt]


def _check(body: CompletionBody, num_prompts: int, num_choices: int) -> None:
    has_scores = body.logprobs is not None
    # A stream's first chunk is sent before the prompt is computed; forks do not compute it.
    is_scored_late = has_scores and (bool(body.stream) or num_choices > 1)
    refuse_unsupported(
        body,
        best_of=body.best_of not in (None, num_choices),
        session_id=bool(body.session_id),
        echo=bool(body.echo) and (body.session_params is not None or is_scored_late),
    )
    if num_prompts * num_choices > MAX_ANSWERS:
        raise InvalidRequest(f"A call has at most {MAX_ANSWERS} answers.", param="prompt")
    if num_prompts > 1 and body.session_params is not None:
        raise InvalidRequest("One prompt is appended to a session.", param="prompt")


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of the tokens of a text, in lists that may be encoded already. `text_offset`: where
    each token begins if the texts of the tokens are joined."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]
    text_offset: tuple[int, ...]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or a chunk of one. `session_id`: the session that was appended to."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    system_fingerprint: None = None
    usage: ChatUsage | msgspec.UnsetType | None = msgspec.UNSET
    session_id: str | msgspec.UnsetType = msgspec.UNSET


class TextAnswer(CountedAnswer):
    """Build one answer to a call, whole or in chunks. `prompt`: its text, for an echo."""

    def __init__(
        self, call: CompletionCall, head: AnswerHead, *, usage: CallUsage, index: int, prompt: str
    ) -> None:
        super().__init__(usage, index=index, num_choices=call.num_choices)
        self._call = call
        self._head = head
        self._prompt = prompt
        self._offset = 0

    def choice(self, end: TurnEnd, *, logprobs: TextLogprobs | None) -> TextChoice:
        """Return the whole answer of a turn."""
        self.note_usage(end.outcome.usage)
        return TextChoice(
            index=self.index,
            text=self._prompt + end.outcome.text,
            logprobs=logprobs,
            finish_reason=finish_reason(end),
        )

    def scored(self, end: TurnEnd) -> tuple[TokenLogprob, ...]:
        """Return the scores of the whole answer, with those of an echoed prompt."""
        return end.outcome.prompt_logprobs + end.outcome.logprobs

    def opening(self) -> tuple[TextCompletion, ...]:
        """Return the chunk of an echo."""
        return (self._chunk(self._prompt),) if self._prompt else ()

    def add(self, delta: TurnDelta, *, logprobs: TextLogprobs | None) -> TextCompletion:
        """Return the chunk of new text; its tokens may have none yet."""
        self.note_delta(delta)
        return self._chunk(delta.text, logprobs=logprobs)

    def closing(self, end: TurnEnd) -> TextCompletion:
        """Return the chunk that says why the answer ended."""
        self.note_usage(end.outcome.usage)
        return self._chunk("", reason=finish_reason(end))

    def text_of(self, score: TokenLogprob) -> str:
        """Return the text of a scored token."""
        return self._head.token_text(score.token_id)

    def top_of(self, score: TokenLogprob) -> dict[str, float] | None:
        """Return what was most likely in a token's place, the token itself included."""
        if score.logprob is None:
            return None
        found: dict[str, float] = {}  # two tokens may have one text: the likelier counts
        for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
            found.setdefault(self._head.token_text(token_id), max(logprob, LEAST_LOGPROB))
        return found

    def offset_of(self, score: TokenLogprob) -> int:
        """Return where the next scored token begins. Call it once for each, in order."""
        offset = self._offset
        self._offset += len(self.text_of(score))
        return offset

    def _chunk(
        self,
        text: str,
        *,
        logprobs: TextLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> TextCompletion:
        choice = TextChoice(index=self.index, text=text, logprobs=logprobs, finish_reason=reason)
        usage: CallUsage | None = None
        if self._call.options.continuous_usage_stats:
            usage = self._call_usage
        return text_completion(self._call, self._head, (choice,), usage=usage)


def text_completion(
    call: CompletionCall,
    head: AnswerHead,
    choices: Sequence[TextChoice],
    *,
    usage: CallUsage | None,
) -> TextCompletion:
    """Return a completion, or a chunk, with the usage so far if it is given."""
    absent = None if call.stream and call.options.include_usage else msgspec.UNSET
    return TextCompletion(
        id=call.id,
        object="text_completion",
        created=head.created_s,
        model=head.model,
        choices=tuple(choices),
        usage=absent if usage is None else usage_body(usage.total()),
        session_id=msgspec.UNSET if call.session is None else head.session_id,
    )
