"""Define what clients of OpenAI's Realtime send, in text modality.

Unknown fields are ignored, as clients of many servers send them; those of audio have no meaning
here. Names of the beta are read as the names that replaced them, and never sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from session_server.core.errors import UnsupportedOperation
from session_server.core.sampling import MAX_OUTPUT_TOKENS, SamplingParams
from session_server.core.session_events import TextOptions
from session_server.protocol.messages import (
    Content,
    ItemId,
    Metadata,
    doc,
    sampling_params,
    text_options,
)
from session_server.protocol.openai_body import SamplingFields, sampling_of
from session_server.protocol.tools import (
    MAX_TOOLS,
    Arguments,
    CallId,
    FunctionBody,
    ToolBody,
    ToolName,
    ToolOrFunction,
    must_call,
    tool_texts,
)

MAX_ITEMS: Final = 4095
"""Items of one conversation: with the instructions, the messages that one input may have."""

MAX_ITEM_PARTS: Final = 1024
MAX_EVENT_ID_CHARS: Final = 512

NumTokensOrAll = Annotated[int, Meta(ge=1, le=1 << 53)] | Literal["inf"]
Modalities = Annotated[list[Literal["text", "audio"]], Meta(max_length=2)]


class RealtimeToolBody(FunctionBody, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function that an answer may call."""


class RealtimeSettings(SamplingFields, frozen=True, kw_only=True):
    """What a session says about every answer, and a response about its own. Absent: as before."""

    instructions: Annotated[Content, doc("the system message before all items")] | None = None
    max_output_tokens: Annotated[NumTokensOrAll, doc("of one answer")] | None = None
    max_response_output_tokens: Annotated[NumTokensOrAll, doc("older name of it")] | None = None
    tools: (
        Annotated[
            list[RealtimeToolBody],
            Meta(max_length=MAX_TOOLS, description="functions that an answer may call"),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[ToolOrFunction, doc("which tools the answer may or must call")] | None
    ) = None
    parallel_tool_calls: Annotated[bool, doc("false: one call at most")] | None = None

    def changed_by(self, other: RealtimeSettings) -> RealtimeSettings:
        """Return these settings, with those that the other names."""
        names = RealtimeSettings.__struct_fields__
        theirs = {name: value for name in names if (value := getattr(other, name)) is not None}
        if older := theirs.pop("max_response_output_tokens", None):
            theirs.setdefault("max_output_tokens", older)
        ours = {name: getattr(self, name) for name in names}
        return RealtimeSettings(**{**ours, **theirs})

    def sampling(self, defaults: SamplingParams) -> tuple[SamplingParams, TextOptions]:
        """Return how an answer is sampled, and becomes text. Raises InvalidRequest."""
        limit = self.max_output_tokens
        num_tokens = limit if isinstance(limit, int) else MAX_OUTPUT_TOKENS
        body = sampling_of(self, max_tokens=num_tokens, param="max_output_tokens")
        choice = self.tool_choice
        text = replace(
            text_options(body),
            may_call=choice != "none",
            is_one_call=self.parallel_tool_calls is False,
            must_call=must_call(choice),
        )
        return sampling_params(body, defaults=defaults), text

    @property
    def tool_texts(self) -> tuple[str, ...]:
        """Return the tools as chat templates get them."""
        return tool_texts([ToolBody(function=_function_of(tool)) for tool in self.tools or ()])


class ResumptionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the session outlives its connection."""

    enabled: bool = False


class SessionSettingsBody(RealtimeSettings, frozen=True, kw_only=True):
    """Body of `session.update`."""

    type: Annotated[Literal["realtime"], doc("no other kind of session is offered")] | None = None
    output_modalities: Annotated[Modalities, doc("with `text`")] | None = None
    modalities: Annotated[Modalities, doc("the older name of the same")] | None = None
    resumption: (
        Annotated[ResumptionBody, doc("enabled: the session outlives its connection")] | None
    ) = None


class ItemPartBody(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message. Parts are joined without a separator."""

    type: Literal["input_text", "output_text", "text"]
    text: Content


class RealtimeItemBody(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Name an item by its `type`."""

    id: Annotated[ItemId, doc("yours; none: made by the server")] | None = None


class MessageItemBody(RealtimeItemBody, frozen=True, kw_only=True, tag="message"):
    """What somebody has said."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[ItemPartBody], Meta(max_length=MAX_ITEM_PARTS)]


class CallItemBody(RealtimeItemBody, frozen=True, kw_only=True, tag="function_call"):
    """A call of a function, as an answer asked for it."""

    call_id: Annotated[CallId, Meta(min_length=1)]
    name: ToolName
    arguments: Arguments


class CallOutputItemBody(RealtimeItemBody, frozen=True, kw_only=True, tag="function_call_output"):
    """What a function gave."""

    call_id: Annotated[CallId, Meta(min_length=1)]
    output: Content


class ItemReferenceBody(RealtimeItemBody, frozen=True, kw_only=True, tag="item_reference"):
    """An item of the conversation."""


NewItemBody = MessageItemBody | CallItemBody | CallOutputItemBody


class ResponseSettingsBody(RealtimeSettings, frozen=True, kw_only=True):
    """Body of `response.create`; what it names holds for this response."""

    conversation: (
        Annotated[Literal["auto", "none"], doc("`none`: the answer becomes no item")] | None
    ) = None
    input: (
        Annotated[
            list[NewItemBody | ItemReferenceBody],
            Meta(max_length=MAX_ITEMS, description="the context, in place of the conversation"),
        ]
        | None
    ) = None
    metadata: Annotated[Metadata, doc("yours; sent back with the response")] | None = None
    output_modalities: Annotated[Modalities, doc("with `text`")] | None = None
    modalities: Annotated[Modalities, doc("the older name of the same")] | None = None


class RealtimeClientFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Name a client's event by its `type`."""

    event_id: (
        Annotated[str, Meta(max_length=MAX_EVENT_ID_CHARS, description="yours; errors name it")]
        | None
    ) = None


class RealtimeSessionUpdate(RealtimeClientFrame, frozen=True, kw_only=True, tag="session.update"):
    """Change settings of the session; answered by `session.updated`."""

    session: SessionSettingsBody
    x_events: Annotated[bool, doc("send events that OpenAI does not know")] | None = None


class RealtimeItemCreate(
    RealtimeClientFrame, frozen=True, kw_only=True, tag="conversation.item.create"
):
    """Put an item into the conversation."""

    item: NewItemBody
    previous_item_id: (
        Annotated[ItemId, doc("the item before it; none: the last one, `root`: no item")] | None
    ) = None


class RealtimeItemDelete(
    RealtimeClientFrame, frozen=True, kw_only=True, tag="conversation.item.delete"
):
    """Take an item out of the conversation."""

    item_id: ItemId


class RealtimeItemRetrieve(
    RealtimeClientFrame, frozen=True, kw_only=True, tag="conversation.item.retrieve"
):
    """Show an item."""

    item_id: ItemId


class RealtimeItemTruncate(
    RealtimeClientFrame, frozen=True, kw_only=True, tag="conversation.item.truncate"
):
    """Cut the audio of an item, which none has here."""

    item_id: ItemId


class RealtimeResponseCreate(RealtimeClientFrame, frozen=True, kw_only=True, tag="response.create"):
    """Answer the conversation."""

    response: ResponseSettingsBody | None = None


class RealtimeResponseCancel(RealtimeClientFrame, frozen=True, kw_only=True, tag="response.cancel"):
    """End a response early; without an id, the one that the conversation waits for."""

    response_id: ItemId | None = None


class InputTextAppend(RealtimeClientFrame, frozen=True, kw_only=True, tag="input_text.append"):
    """Add to what the user is about to say, which is computed ahead."""

    text: Content


class InputTextClear(RealtimeClientFrame, frozen=True, kw_only=True, tag="input_text.clear"):
    """The user says nothing of it."""


class InputTextCommit(RealtimeClientFrame, frozen=True, kw_only=True, tag="input_text.commit"):
    """The user has said it: it is an item now."""

    item_id: Annotated[ItemId, doc("yours; none: made by the server")] | None = None


class _AudioFrame(RealtimeClientFrame, frozen=True, kw_only=True):
    """What is about audio."""


class AudioAppend(_AudioFrame, frozen=True, kw_only=True, tag="input_audio_buffer.append"):
    """Refused: there is no audio here."""


class AudioCommit(_AudioFrame, frozen=True, kw_only=True, tag="input_audio_buffer.commit"):
    """Refused: there is no audio here."""


class AudioClear(_AudioFrame, frozen=True, kw_only=True, tag="input_audio_buffer.clear"):
    """Refused: there is no audio here."""


class AudioOutputClear(_AudioFrame, frozen=True, kw_only=True, tag="output_audio_buffer.clear"):
    """Refused: there is no audio here."""


AudioFrame = AudioAppend | AudioCommit | AudioClear | AudioOutputClear
RealtimeClientEvent = (
    RealtimeSessionUpdate
    | RealtimeItemCreate
    | RealtimeItemDelete
    | RealtimeItemRetrieve
    | RealtimeItemTruncate
    | RealtimeResponseCreate
    | RealtimeResponseCancel
    | InputTextAppend
    | InputTextClear
    | InputTextCommit
    | AudioFrame
)


def _function_of(tool: RealtimeToolBody) -> FunctionBody:
    names = FunctionBody.__struct_fields__
    return FunctionBody(**{name: getattr(tool, name) for name in names})


def check_modalities(body: SessionSettingsBody | ResponseSettingsBody, *, at: str) -> None:
    """Reject answers without text. Raises UnsupportedOperation."""
    for name in ("output_modalities", "modalities"):
        asked = getattr(body, name)
        if asked is not None and "text" not in asked:
            raise UnsupportedOperation("Only text is offered.", param=f"{at}.{name}")
