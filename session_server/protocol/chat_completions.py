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
from dataclasses import dataclass, replace
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
    Content,
    SamplingBody,
    TopLogprobs,
    doc,
    sampling_params,
    text_options,
)
from session_server.protocol.openai_body import (
    Name,
    NotOffered,
    NumTokensAsked,
    OpenAIBody,
    StreamOptions,
    appended_to,
    grammar_of,
    refuse_unsupported,
    sampling_of,
)
from session_server.protocol.tools import (
    MAX_CALLS,
    CallId,
    ToolCallBody,
    ToolChoice,
    Tools,
    calls_of,
    must_call,
    tool_texts,
)

MAX_CHAT_MESSAGES: Final = 4096
MAX_CHAT_PARTS: Final = 1024

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
    tool_calls: Annotated[list[ToolCallBody], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: Content | None = None
    function_call: Any = None


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[
        list[ChatMessageBody],
        Meta(min_length=1, max_length=MAX_CHAT_MESSAGES, description="the whole conversation"),
    ]
    max_completion_tokens: (
        Annotated[NumTokensAsked, doc("of the answer; absent: what the context leaves")] | None
    ) = None
    max_tokens: Annotated[NumTokensAsked, doc("the older name of the same")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[TopLogprobs, doc("needs `logprobs`")] | None = None
    session_id: Annotated[Name, doc("the session of this conversation")] | None = None
    prompt_cache_key: (
        Annotated[Name, doc("without `session_id`: conversations of other keys are others")] | None
    ) = None
    modalities: Annotated[list[str], doc("only `text` is offered")] | None = None
    add_generation_prompt: Annotated[bool, doc("only true is offered")] | None = None
    tools: Annotated[Tools, doc("functions that the answer may call")] | None = None
    tool_choice: Annotated[ToolChoice, doc("which tools the answer may or must call")] | None = None
    parallel_tool_calls: Annotated[bool, doc("false: one call at most")] | None = None
    functions: NotOffered = None
    function_call: NotOffered = None
    audio: NotOffered = None
    best_of: NotOffered = None
    chat_template: NotOffered = None
    chat_template_kwargs: NotOffered = None
    continue_final_message: NotOffered = None
    documents: NotOffered = None
    echo: NotOffered = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """Hold one decoded request.

    `session`: the client's name for the session, None where it names none. `hint`: what such a
    call says about its conversation, which other conversations may share. `is_append`: the session
    is open, and the messages are new. `num_choices`: answers asked for.
    """

    request: TurnRequest
    session: str | None
    hint: str
    is_append: bool
    stream: bool
    options: StreamOptions
    num_choices: int = 1

    @property
    def input(self) -> ChatInput:
        """Return the messages and tools given."""
        assert isinstance(self.request.input, ChatInput), "parse_chat made it"
        return self.request.input


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
    refuse_unsupported(
        body,
        modalities=body.modalities not in (None, [], ["text"]),
        add_generation_prompt=body.add_generation_prompt is False,
    )
    if body.session_id is not None and body.session_params is not None:
        raise InvalidRequest(
            "session_id and session_params cannot both be set.", param="session_params"
        )
    session = None if body.session_params is None else appended_to(body.session_params)
    sampling = _sampling(body)
    # An answer ends by itself or with the context unless the client says otherwise.
    unbounded = msgspec.structs.replace(
        defaults, max_tokens=MAX_OUTPUT_TOKENS, grammar=grammar_of(body)
    )
    request = TurnRequest(
        turn_id=turn_id,
        input=ChatInput(_messages(body.messages), session is None, tool_texts(body.tools or ())),
        sampling=sampling_params(sampling, defaults=unbounded),
        text=replace(
            text_options(sampling),
            may_call=body.tool_choice != "none",
            is_one_call=body.parallel_tool_calls is False,
            must_call=must_call(body.tool_choice),
        ),
        priority=body.priority or 0,
        on_disconnect="cancel",
    )
    return ChatCall(
        request=request,
        session=session or body.session_id or None,
        hint=body.prompt_cache_key or hint,
        is_append=session is not None,
        stream=bool(body.stream),
        options=body.stream_options or StreamOptions(),
        num_choices=body.n or 1,
    )


def session_id_of(name: str) -> str:
    """Return the id of the session that a client's name stands for."""
    if _SESSION_ID.fullmatch(name):
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16)
    return f"key_{digest.hexdigest()}"


def _messages(bodies: Sequence[ChatMessageBody]) -> tuple[Message, ...]:
    for index, body in enumerate(bodies):
        if body.function_call:
            raise UnsupportedOperation(
                "function_call is not supported here.", param=f"messages[{index}].function_call"
            )
        if body.content is None and body.role != "assistant":
            raise InvalidRequest("A message needs content.", param=f"messages[{index}].content")
    return tuple(
        Message(
            role=body.role,
            content=_text_of(body.content),
            tool_calls=calls_of(body.tool_calls or ()),
            tool_call_id=body.tool_call_id or "",
            reasoning=body.reasoning_content or "",
        )
        for body in bodies
    )


def _text_of(content: str | list[ChatPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _sampling(body: ChatBody) -> SamplingBody:
    """Return the sampling options under our names. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    max_tokens = body.max_completion_tokens or body.max_tokens or MAX_OUTPUT_TOKENS
    return sampling_of(
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        keep_stop=body.include_stop_str_in_output,
    )
