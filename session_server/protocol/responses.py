"""Translate what clients of OpenAI's Responses send: bodies over HTTP, frames over a WebSocket.

Unknown fields are ignored, as clients of many servers send them; what would change the answer and
is not offered is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from session_server.core.errors import InvalidRequest
from session_server.core.sampling import MAX_OUTPUT_TOKENS, SamplingParams
from session_server.core.session_events import Message, TextOptions, TurnInput, TurnRequest
from session_server.protocol.grammars import of_format
from session_server.protocol.messages import (
    Content,
    Metadata,
    TopLogprobs,
    doc,
    sampling_params,
    text_options,
)
from session_server.protocol.openai_body import (
    Name,
    NotOffered,
    NumTokensAsked,
    SamplingFields,
    refuse_unsupported,
    sampling_of,
)
from session_server.protocol.response_body import FunctionToolBody, ResponseBody
from session_server.protocol.response_items import MAX_ITEMS, FindItem, InputItemBody, messages_of
from session_server.protocol.tools import MAX_TOOLS, ToolOrFunction, must_call, tool_texts

LOGPROBS: Final = "message.output_text.logprobs"

ResponseId = Annotated[str, Meta(min_length=1, max_length=64)]


class ConversationRef(msgspec.Struct, frozen=True, kw_only=True):
    """Name a conversation."""

    id: ResponseId


class TextFormatBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of an answer must be."""

    type: Annotated[str, doc("`text`, `json_object` or `json_schema`")]
    name: Name | None = None
    description: Content | None = None
    schema: dict[str, Any] | None = None
    strict: Annotated[bool, doc("it is held to, strict or not")] | None = None


class TextConfigBody(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of an answer is to be."""

    format: TextFormatBody | None = None


InputBody = (
    Annotated[Content, doc("a user's message")]
    | Annotated[list[InputItemBody], Meta(max_length=MAX_ITEMS)]
)


class ResponseFields(SamplingFields, frozen=True, kw_only=True):
    """The fields of a response to be made, the same over HTTP and on a WebSocket."""

    model: Annotated[Name, doc("the one served, or nothing")] | None = None
    input: InputBody | None = None
    instructions: (
        Annotated[Content, doc("the system message; not inherited by the next response")] | None
    ) = None
    previous_response_id: Annotated[ResponseId, doc("the response to go on from")] | None = None
    conversation: (
        Annotated[ResponseId, doc("the conversation to go on with; or an object with its `id`")]
        | ConversationRef
        | None
    ) = None
    store: Annotated[bool, doc("keep it for later calls; absent: true")] | None = None
    generate: Annotated[bool, doc("false: compute the input, answer nothing")] | None = None
    max_output_tokens: (
        Annotated[NumTokensAsked, doc("of the answer; absent: what the context leaves")] | None
    ) = None
    include: (
        Annotated[list[str], Meta(max_length=16, description=f"`{LOGPROBS}`; others are ignored")]
        | None
    ) = None
    top_logprobs: Annotated[TopLogprobs, doc("of each token; above 0 includes logprobs")] | None = (
        None
    )
    metadata: Annotated[Metadata, doc("yours; shown with the response")] | None = None
    prompt_cache_key: Annotated[Name, doc("shown with the response")] | None = None
    safety_identifier: Annotated[Name, doc("shown with the response")] | None = None
    user: Annotated[Name, doc("shown with the response")] | None = None
    parallel_tool_calls: Annotated[bool, doc("false: one call at most")] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    truncation: Annotated[str, doc("only `disabled` is offered")] | None = None
    text: Annotated[TextConfigBody, doc("`format`")] | None = None
    tools: (
        Annotated[
            list[FunctionToolBody],
            Meta(max_length=MAX_TOOLS, description="functions that the answer may call"),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[ToolOrFunction, doc("which tools the answer may or must call")] | None
    ) = None
    context_management: NotOffered = None
    moderation: NotOffered = None
    prompt: NotOffered = None


class ResponseCreateBody(ResponseFields, frozen=True, kw_only=True):
    """Body of `POST /v1/responses`."""

    stream: Annotated[bool, doc("answer in events")] | None = None
    background: (
        Annotated[bool, doc("run on when the client leaves; answer at once unless `stream`")] | None
    ) = None


class InputTokensBody(ResponseFields, frozen=True, kw_only=True):
    """Body of `POST /v1/responses/input_tokens`."""


class CompactBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/responses/compact`."""

    model: Annotated[Name, doc("the one served")] | None
    input: InputBody | None = None
    instructions: (
        Annotated[Content, doc("no part of the window; absent: those of the previous response")]
        | None
    ) = None
    previous_response_id: Annotated[ResponseId, doc("the response to go on from")] | None = None
    prompt_cache_key: Annotated[Name, doc("read, and changes nothing")] | None = None

    def summary_fields(self, previous: ResponseBody | None, *, max_tokens: int) -> ResponseFields:
        """Return the response that is a summary. It begins as the one that it goes on from did,
        with its tools and instructions: then little is to be computed."""
        instructions = self.instructions
        if instructions is None and previous is not None:
            instructions = previous.instructions
        return ResponseFields(
            model=self.model,
            input=self.input,
            instructions=instructions,
            previous_response_id=self.previous_response_id,
            store=False,
            min_tokens=1,
            max_output_tokens=max_tokens,
            tools=None if previous is None else list(previous.tools),
            tool_choice="none",
        )


MAX_NEW_ITEMS: Final = 20

NewItems = Annotated[list[InputItemBody], Meta(max_length=MAX_NEW_ITEMS)]


class ConversationCreateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/conversations`."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationUpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/conversations/{id}`."""

    metadata: Metadata | None


class ConversationItemsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: NewItems


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """Hold one decoded request.

    `messages`: the new ones, without the instructions. `body`: the response as it begins.
    """

    response_id: str
    messages: tuple[Message, ...]
    sampling: SamplingParams
    text: TextOptions
    priority: int
    body: ResponseBody

    @property
    def generate(self) -> bool:
        """Return whether there is an answer to come."""
        return self.sampling.max_tokens > 0

    @property
    def opening(self) -> tuple[Message, ...]:
        """Return the messages that every context of this call begins with."""
        instructions = self.body.instructions
        return () if instructions is None else (Message("system", instructions),)

    @property
    def tools(self) -> tuple[str, ...]:
        """Return the tools as chat templates take them."""
        return tool_texts([tool.as_tool() for tool in self.body.tools])

    def turn(self, turn_input: TurnInput) -> TurnRequest:
        """Return the turn that makes the response. Over HTTP and WebSocket alike `web` decides what
        a lost client means for it."""
        return TurnRequest(
            turn_id=self.response_id,
            input=turn_input,
            sampling=self.sampling,
            text=self.text,
            priority=self.priority,
            queue=False,
        )


def parse_response(
    fields: ResponseFields,
    *,
    response_id: str,
    model: str,
    created_s: int,
    defaults: SamplingParams,
    find: FindItem = lambda _: None,
) -> ResponseCall:
    """Translate a request. Raises InvalidRequest: it contradicts itself, or asks for what is not
    offered. Raises ItemNotFound: it refers to an item that is not kept.

    Args:
        fields: as received.
        response_id: the response's id, and its turn's.
        model: the name of the one served.
        created_s: wall-clock seconds.
        defaults: the model's sampling.
        find: of items that are kept.
    """
    refuse_unsupported(
        fields,
        truncation=fields.truncation not in (None, "disabled"),
    )
    if fields.previous_response_id is not None and fields.conversation is not None:
        raise InvalidRequest(
            "previous_response_id and conversation cannot both be set.", param="conversation"
        )
    sampling, text = _sampling(fields, defaults)
    if _is_background(fields) and fields.store is False:
        raise InvalidRequest("background needs store: true.", param="background")
    body = _beginning(fields, sampling, response_id=response_id, model=model, created_s=created_s)
    return ResponseCall(
        response_id=response_id,
        messages=messages_of(fields.input, find),
        sampling=sampling,
        text=text,
        priority=fields.priority or 0,
        body=body,
    )


def _beginning(
    fields: ResponseFields,
    sampling: SamplingParams,
    *,
    response_id: str,
    model: str,
    created_s: int,
) -> ResponseBody:
    """Return a response as it begins."""
    conversation = fields.conversation
    if isinstance(conversation, str):
        conversation = ConversationRef(id=conversation)
    return ResponseBody(
        id=response_id,
        created_at=created_s,
        status="in_progress",
        background=_is_background(fields),
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        max_tool_calls=fields.max_tool_calls,
        model=model,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        previous_response_id=fields.previous_response_id,
        prompt_cache_key=fields.prompt_cache_key,
        safety_identifier=fields.safety_identifier,
        store=fields.store is not False,
        temperature=sampling.temperature,
        tool_choice=fields.tool_choice or "auto",
        tools=tuple(fields.tools or ()),
        top_logprobs=sampling.top_logprobs,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        text={"format": msgspec.to_builtins(_format(fields))},
        user=fields.user,
        metadata=fields.metadata or {},
        conversation=None if conversation is None else {"id": conversation.id},
    )


def _is_background(fields: ResponseFields) -> bool:
    return isinstance(fields, ResponseCreateBody) and bool(fields.background)


def _sampling(
    fields: ResponseFields, defaults: SamplingParams
) -> tuple[SamplingParams, TextOptions]:
    """Return how the answer is sampled, and becomes text. Raises InvalidRequest."""
    body = sampling_of(
        fields,
        # An answer ends by itself or with the context unless the client says otherwise.
        max_tokens=fields.max_output_tokens or MAX_OUTPUT_TOKENS,
        param="max_output_tokens",
        logprobs=bool(fields.top_logprobs) or LOGPROBS in (fields.include or ()),
        top_logprobs=fields.top_logprobs,
    )
    if fields.generate is False:
        body = msgspec.structs.replace(body, max_tokens=0, min_tokens=0)
    form = _format(fields)
    grammar = of_format(form.type, {"name": form.name, "schema": form.schema}, "text.format")
    held = msgspec.structs.replace(defaults, grammar=grammar)
    text = replace(
        text_options(body),
        may_call=fields.tool_choice != "none",
        is_one_call=fields.parallel_tool_calls is False,
        must_call=must_call(fields.tool_choice),
    )
    return sampling_params(body, defaults=held), text


def _format(fields: ResponseFields) -> TextFormatBody:
    """Return what the text of the answer must be."""
    asked = None if fields.text is None else fields.text.format
    return asked or TextFormatBody(type="text")
