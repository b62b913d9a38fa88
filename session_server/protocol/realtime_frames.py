"""Define what the server sends in OpenAI's Realtime: strictly what its SDK's types say."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from session_server.core.session_events import TokenUsage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
RateName = Literal["requests", "tokens"]
ResponseStatus = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]


class RealtimePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message. A part of an answer is a `text` in events of content parts."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RealtimeItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """An item of a conversation."""

    id: str
    object: Literal["realtime.item"] = "realtime.item"
    status: ItemStatus = "completed"


class RealtimeMessage(RealtimeItem, frozen=True, kw_only=True, tag="message"):
    """What somebody has said."""

    role: Literal["system", "user", "assistant"]
    content: tuple[RealtimePart, ...]

    @property
    def text(self) -> str:
        """Return the parts joined."""
        if len(self.content) == 1:
            return self.content[0].text
        return "".join(part.text for part in self.content)


class RealtimeCall(RealtimeItem, frozen=True, kw_only=True, tag="function_call"):
    """A call of a function that the client is to run. `arguments`: JSON, as the answer has it."""

    call_id: str
    name: str
    arguments: str


class RealtimeCallOutput(RealtimeItem, frozen=True, kw_only=True, tag="function_call_output"):
    """What a function gave."""

    call_id: str
    output: str


RealtimeAnyItem = RealtimeMessage | RealtimeCall | RealtimeCallOutput


class RealtimeSessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that hold now."""

    type: Literal["realtime"]
    object: Literal["realtime.session"]
    id: str
    model: str
    output_modalities: tuple[Literal["text"], ...]
    instructions: str
    tools: tuple[Any, ...]
    tool_choice: Any
    max_output_tokens: int | Literal["inf"]
    truncation: Literal["disabled"]
    resumption: dict[str, bool]
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    stop: Any | UnsetType = UNSET


class RealtimeConversationBody(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation. Its id is the key of a later connection to it."""

    id: str
    object: Literal["realtime.conversation"] = "realtime.conversation"


class CachedDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of tokens that were not computed again."""

    text_tokens: int
    audio_tokens: int = 0
    image_tokens: int = 0


class RealtimeInputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of tokens of a context. `cached_tokens` of them were not computed again."""

    text_tokens: int
    cached_tokens: int
    cached_tokens_details: CachedDetails
    audio_tokens: int = 0
    image_tokens: int = 0


class RealtimeOutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of tokens of an answer."""

    text_tokens: int
    audio_tokens: int = 0


class RealtimeUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a response; the context is the whole conversation."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: RealtimeInputDetails
    output_token_details: RealtimeOutputDetails


class RealtimeFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed."""

    type: str
    code: str
    message: str


class RealtimeStatusDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a response is not complete."""

    type: Literal["cancelled", "failed", "incomplete"]
    reason: Literal["client_cancelled", "max_output_tokens"] | None = None
    error: RealtimeFailure | None = None


class RealtimeResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A response, running or ended."""

    id: str
    status: ResponseStatus
    conversation_id: str | None
    max_output_tokens: int | Literal["inf"]
    metadata: dict[str, str] | None
    object: Literal["realtime.response"] = "realtime.response"
    status_details: RealtimeStatusDetails | None = None
    output: tuple[RealtimeMessage | RealtimeCall, ...] = ()
    output_modalities: tuple[Literal["text"], ...] = ("text",)
    usage: RealtimeUsage | None = None


class RealtimeErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Why an event of the client had no effect. `event_id` is that event's."""

    type: str
    code: str
    message: str
    param: str | None
    event_id: str | None


class RealtimeFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Root of the server's events."""

    event_id: str


class RealtimeSessionCreated(RealtimeFrame, frozen=True, kw_only=True, tag="session.created"):
    """The first event of a connection."""

    session: RealtimeSessionBody


class RealtimeSessionUpdated(RealtimeFrame, frozen=True, kw_only=True, tag="session.updated"):
    """The settings that hold from now on."""

    session: RealtimeSessionBody


class ConversationCreated(RealtimeFrame, frozen=True, kw_only=True, tag="conversation.created"):
    """The second event of a connection."""

    conversation: RealtimeConversationBody


class _ItemFrame(RealtimeFrame, frozen=True, kw_only=True):
    previous_item_id: str | None
    item: RealtimeAnyItem


class ItemAdded(_ItemFrame, frozen=True, kw_only=True, tag="conversation.item.added"):
    """The conversation has another item, perhaps an answer that has only begun."""


class ItemDone(_ItemFrame, frozen=True, kw_only=True, tag="conversation.item.done"):
    """The item is as it stays."""


class ItemDeleted(RealtimeFrame, frozen=True, kw_only=True, tag="conversation.item.deleted"):
    """The item is no longer in the conversation."""

    item_id: str


class ItemRetrieved(RealtimeFrame, frozen=True, kw_only=True, tag="conversation.item.retrieved"):
    """An item that was asked for."""

    item: RealtimeAnyItem


class RealtimeResponseCreated(RealtimeFrame, frozen=True, kw_only=True, tag="response.created"):
    """The response was accepted."""

    response: RealtimeResponseBody


class RealtimeResponseDone(RealtimeFrame, frozen=True, kw_only=True, tag="response.done"):
    """The last event of a response."""

    response: RealtimeResponseBody


class RealtimeRateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a rate: of `requests`, or of `tokens` where fewest are left, of the input or
    the output. `reset_seconds`: until all of `limit` is there again."""

    name: RateName
    limit: int
    remaining: int
    reset_seconds: float


class RateLimitsUpdated(RealtimeFrame, frozen=True, kw_only=True, tag="rate_limits.updated"):
    """What is left of the key's rates as a response begins. Not sent where it has none."""

    rate_limits: tuple[RealtimeRateLimit, ...]


class _OutputFrame(RealtimeFrame, frozen=True, kw_only=True):
    response_id: str
    output_index: int


class OutputItemAdded(_OutputFrame, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item of the answer begins."""

    item: RealtimeAnyItem


class OutputItemDone(_OutputFrame, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item of the answer is as it stays."""

    item: RealtimeAnyItem


class _PartFrame(_OutputFrame, frozen=True, kw_only=True):
    item_id: str
    content_index: int = 0


class ContentPartAdded(_PartFrame, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A part of an item begins."""

    part: RealtimePart


class ContentPartDone(_PartFrame, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part of an item is as it stays."""

    part: RealtimePart


class OutputTextDelta(_PartFrame, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """New text of the answer."""

    delta: str


class OutputTextDone(_PartFrame, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The text of a part."""

    text: str


class ArgumentsDelta(
    _OutputFrame, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """New text of the arguments of a call."""

    item_id: str
    call_id: str
    delta: str


class ArgumentsDone(
    _OutputFrame, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """The arguments of a call."""

    item_id: str
    call_id: str
    name: str
    arguments: str


class InputTextDrafted(RealtimeFrame, frozen=True, kw_only=True, tag="input_text.drafted"):
    """What the user is about to say is computed ahead: `processed` of the `total` tokens of the
    context, `kept` of which were there before. Only after `x_events`."""

    processed: int
    kept: int
    total: int


class RealtimeError(RealtimeFrame, frozen=True, kw_only=True, tag="error"):
    """An event of the client had no effect, or the session ends; the connection stays open
    otherwise."""

    error: RealtimeErrorBody


RealtimeServerEvent = (
    RealtimeSessionCreated
    | RealtimeSessionUpdated
    | ConversationCreated
    | ItemAdded
    | ItemDone
    | ItemDeleted
    | ItemRetrieved
    | RealtimeResponseCreated
    | RealtimeResponseDone
    | RateLimitsUpdated
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputTextDrafted
    | RealtimeError
)


def realtime_usage(usage: TokenUsage) -> RealtimeUsage:
    """Return token counts in Realtime's form."""
    return RealtimeUsage(
        total_tokens=usage.total_tokens,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        input_token_details=RealtimeInputDetails(
            text_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            cached_tokens_details=CachedDetails(text_tokens=usage.cached_tokens),
        ),
        output_token_details=RealtimeOutputDetails(text_tokens=usage.output_tokens),
    )
