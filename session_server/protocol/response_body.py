"""Define the response object of OpenAI's Responses, and what it is when its turn has ended."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, assert_never

import msgspec
from msgspec import Meta, structs

from session_server.core.session_events import (
    Message,
    TokenUsage,
    TurnCancelled,
    TurnCompleted,
    TurnEnd,
    TurnFailedEntry,
)
from session_server.protocol.chat_answer import CachedTokens, ReasoningTokens
from session_server.protocol.errors import sanitize
from session_server.protocol.response_items import (
    AnyItem,
    CompactionItem,
    ItemStatus,
    OutputItem,
    answer_items,
)
from session_server.protocol.tools import (
    MAX_DESCRIPTION_CHARS,
    FunctionBody,
    ToolBody,
    ToolName,
)

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; the input is the whole context."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed. `code` is one of OpenAI's few; the message begins with ours."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer was cut."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the model was asked to think; nothing here changes it."""

    effort: None = None
    summary: None = None


class FunctionToolBody(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function that an answer may call. `parameters` is its JSON schema; `strict` is shown, and
    changes nothing."""

    name: ToolName
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_tool(self) -> ToolBody:
        """Return it as Chat Completions write it."""
        return ToolBody(
            function=FunctionBody(
                name=self.name, description=self.description, parameters=self.parameters
            )
        )


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A response; `session_id` names the session that holds what was said. `durable`: whether it
    was on disk when it ended; null for one that is not stored there."""

    id: str
    object: Literal["response"] = "response"
    created_at: float
    completed_at: float | None = None
    status: Status
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig = ReasoningConfig()
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = True
    temperature: float = 1.0
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any = "auto"
    tools: tuple[FunctionToolBody, ...] = ()
    top_logprobs: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    conversation: dict[str, str] | None = None
    session_id: str | None = None
    durable: bool | None = None

    @property
    def suffix(self) -> str:
        """Return what the ids of the response's items end with."""
        return self.id.partition("_")[2]

    def begun(self) -> ResponseBody:
        """Return the response as it was when it began."""
        return structs.replace(
            self,
            status="in_progress",
            completed_at=None,
            error=None,
            incomplete_details=None,
            output=(),
            usage=None,
            durable=None,
        )

    def interrupted(self, *, is_durable: bool) -> ResponseBody:
        """Return the response as it is if the server ends before it does."""
        failure = ResponseFailure(
            code="server_error", message="The server ended before the response did: send it again."
        )
        return structs.replace(self, status="failed", error=failure, durable=is_durable)

    def ended(
        self, end: TurnEnd, *, now_s: int, output: tuple[OutputItem, ...] | None = None
    ) -> ResponseBody:
        """Return the response as its turn's end makes it. `output` None: the items of the whole
        answer, without logprobs. `now_s`: wall-clock seconds."""
        status = _status_of(end)
        if output is None:
            answer = answer_of(end)
            output = () if answer is None else items_of(end, answer, self.suffix)
        return structs.replace(
            self,
            status=status,
            completed_at=now_s if status == "completed" else None,
            error=_failure_of(end),
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=output,
            usage=usage_of(end.outcome.usage),
            durable=end.outcome.is_durable if self.store else None,
        )


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is gone. `durable`: whether it is gone from the disk too; null for one that
    was never there."""

    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True
    durable: bool | None = None


class InputTokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a context has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class CompactionBody(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that was compacted: `output` stands for all of it in a later input."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: tuple[CompactionItem, ...]
    usage: ResponseUsage


class ConversationBody(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation. `durable`: whether all of it is on disk; null where there is no store."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]
    durable: bool | None = None


class ConversationDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that is gone. `durable`: whether it is gone from the disk too; null for one
    that was never there."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
    durable: bool | None = None


class ResponseItems(msgspec.Struct, frozen=True, kw_only=True):
    """A page of items; `data` may be encoded already."""

    object: Literal["list"] = "list"
    data: tuple[AnyItem, ...]
    first_id: str
    last_id: str
    has_more: bool


def answer_of(end: TurnEnd) -> Message | None:
    """Return the answer of a turn; None where there is none: input that was only computed, or a
    failure."""
    outcome = end.outcome
    has_said = bool(outcome.text or outcome.reasoning or outcome.tool_calls)
    if not has_said and (isinstance(end, TurnFailedEntry) or not outcome.usage.output_tokens):
        return None
    return Message(
        "assistant", outcome.text, tool_calls=outcome.tool_calls, reasoning=outcome.reasoning
    )


def items_of(end: TurnEnd, answer: Message, suffix: str) -> tuple[OutputItem, ...]:
    """Return the items of a turn's answer."""
    return tuple(answer_items(answer, suffix, status=item_status(end)))


def item_status(end: TurnEnd) -> ItemStatus:
    """Return the status of what was being said when a turn ended."""
    return "completed" if _status_of(end) == "completed" else "incomplete"


def usage_of(usage: TokenUsage) -> ResponseUsage:
    """Return the token counts of a turn."""
    return ResponseUsage(
        input_tokens=usage.input_tokens,
        input_tokens_details=CachedTokens(
            cached_tokens=usage.cached_tokens, cache_write_tokens=usage.cache_write_tokens
        ),
        output_tokens=usage.output_tokens,
        output_tokens_details=ReasoningTokens(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _status_of(end: TurnEnd) -> Status:
    match end:
        case TurnCompleted(reason=reason, outcome=outcome):
            # Input that was only computed has reached its length: none.
            is_cut = reason == "length" and outcome.usage.output_tokens > 0
            return "incomplete" if is_cut else "completed"
        case TurnCancelled():
            return "cancelled"
        case TurnFailedEntry():
            return "failed"
        case _:
            assert_never(end)


_RATE_LIMITED: Final = frozenset({"quota_exceeded"})
_OF_PROMPT: Final = frozenset({"context_too_long", "tokenize_failed", "invalid_request"})


def _failure_of(end: TurnEnd) -> ResponseFailure | None:
    if not isinstance(end, TurnFailedEntry):
        return None
    message = sanitize(f"{end.code}: {end.message}")
    if end.code in _RATE_LIMITED:
        return ResponseFailure(code="rate_limit_exceeded", message=message)
    if end.code in _OF_PROMPT:
        return ResponseFailure(code="invalid_prompt", message=message)
    return ResponseFailure(code="server_error", message=message)
