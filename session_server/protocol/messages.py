"""Define what clients of the native protocol send: REST bodies and `kvsession.v1` frames.

Every field is bounded on both sides and typed strictly; unknown fields are refused, so that a
misspelt option is an error and never silently ignored. `decode` is the only door.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from session_server.core.errors import InvalidRequest
from session_server.core.ids import new_turn_id
from session_server.core.sampling import (
    MAX_LOGIT_BIAS,
    MAX_OUTPUT_TOKENS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    Message,
    Role,
    TextInput,
    TextOptions,
    TokenInput,
    ToolCall,
    TurnInput,
    TurnRequest,
)
from session_server.protocol import grammars
from session_server.protocol.errors import to_invalid_request
from session_server.protocol.grammars import GrammarText, JsonSchema
from session_server.protocol.tools import (
    MAX_CALLS,
    Arguments,
    CallId,
    ToolChoice,
    Tools,
    must_call,
    tool_texts,
)

MAX_MESSAGES: Final = 256
MAX_CONTENT_CHARS: Final = 1 << 20
MAX_PARTS: Final = 64
MAX_INPUT_IDS: Final = 1 << 20
MAX_TOKEN_ID: Final = (1 << 31) - 1
MAX_PRIORITY: Final = 100
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_METADATA: Final = 16
MAX_ID_CHARS: Final = 64
MIN_TTL_S: Final = 1.0
MAX_TTL_S: Final = 7 * 86_400.0
MAX_SEQ: Final = (1 << 53) - 1


def doc(text: str) -> Meta:
    """Describe a field for the published schemas and the documentation."""
    return Meta(description=text)


Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:\-]{1,64}$(?!\n)", description="client-chosen id")]
ItemId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_INPUT_IDS)]
Metadata = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MAX_METADATA),
]
TtlS = Annotated[float, Meta(ge=MIN_TTL_S, le=MAX_TTL_S, description="idle seconds to live")]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Content = Annotated[str, Meta(max_length=MAX_CONTENT_CHARS)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 30)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
TokenIdKey = Annotated[str, Meta(pattern=r"^[0-9]{1,10}$(?!\n)")]
LogitBias = Annotated[dict[TokenIdKey, Bias], Meta(max_length=MAX_LOGIT_BIAS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
NumTokens = Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
OnDisconnect = Literal["detach", "cancel"]
_INPUTS: Final = ("input", "text", "input_ids")
_KEEP_PARTIAL: Final = "keep what was said so far; false: as before the turn"

BodyT = TypeVar("BodyT")


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reject unknown fields, in every body and frame of a client."""


class ClientFrame(Body, frozen=True, kw_only=True, tag_field="type"):
    """Name a frame of a client by its `type`."""


class TextPart(Body, frozen=True, kw_only=True):
    """A part of a message. Parts are joined without a separator."""

    type: Literal["text"]
    text: Content


class CallBody(Body, frozen=True, kw_only=True):
    """A call in an answer, as `turn.completed` has it."""

    id: CallId
    name: str
    arguments: Arguments


class MessageBody(Body, frozen=True, kw_only=True):
    """One chat message. What an assistant called and thought, and which call a tool answers, is as
    the items have it."""

    role: Role
    content: Content | Annotated[list[TextPart], Meta(min_length=1, max_length=MAX_PARTS)]
    tool_calls: Annotated[list[CallBody], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning: Content | None = None


class SamplingBody(Body, frozen=True, kw_only=True):
    """Sampling options; a field that is absent or null takes the server's default."""

    instead: ClassVar = dict.fromkeys(
        ("max_completion_tokens", "max_output_tokens"), "did you mean max_tokens?"
    )

    max_tokens: Annotated[NumTokens, doc("of the answer, at most")] | None = None
    min_tokens: Annotated[NumTokens, doc("before the answer may end by itself")] | None = None
    temperature: Annotated[Temperature, doc("0 is greedy and exact")] | None = None
    top_k: Annotated[TopK, doc("most likely tokens kept; 0 and -1: all")] | None = None
    top_p: Annotated[TopP, doc("probability kept, from the most likely on")] | None = None
    min_p: (
        Annotated[Fraction, doc("least probability kept, relative to the most likely")] | None
    ) = None
    repetition_penalty: (
        Annotated[
            float, Meta(gt=0.0, le=10.0, description="on tokens of context and answer; 1: none")
        ]
        | None
    ) = None
    presence_penalty: Annotated[Penalty, doc("once per token of the answer")] | None = None
    frequency_penalty: Annotated[Penalty, doc("each time a token is in the answer")] | None = None
    seed: Annotated[Seed, doc("makes the text a function of seed and context")] | None = None
    logit_bias: Annotated[LogitBias, doc("added to the logits of token ids")] | None = None
    stop: (
        Annotated[StopString, doc("texts that end the answer")]
        | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
        | None
    ) = None
    stop_token_ids: Annotated[StopTokenIds, doc("token ids that end the answer")] | None = None
    ignore_eos: Annotated[bool, doc("do not end at the model's end tokens")] | None = None
    logprobs: Annotated[bool, doc("of the answer's tokens")] | None = None
    top_logprobs: Annotated[TopLogprobs, doc("alternatives beside each logprob")] | None = None
    prompt_logprobs_from: (
        Annotated[
            int,
            Meta(ge=0, le=MAX_INPUT_IDS, description="logprobs of context positions from here on"),
        ]
        | None
    ) = None
    keep_stop: Annotated[bool, doc("leave the stop string in the text")] | None = None
    skip_special_tokens: Annotated[bool, doc("leave control tokens out of the text")] | None = None
    json_schema: Annotated[JsonSchema, doc("the answer is JSON that fits it")] | None = None
    regex: Annotated[GrammarText, doc("the whole answer matches it")] | None = None
    grammar: Annotated[GrammarText, doc("the answer matches this Lark grammar")] | None = None


class InputFields(Body, frozen=True, kw_only=True):
    """What is said. Exactly one of `input`, `text` and `input_ids` is given."""

    instead: ClassVar = dict.fromkeys(("content", "messages", "prompt"), "did you mean input?")

    input: (
        Annotated[
            Content,
            doc(
                "new messages; a string is one message of the user, an empty list answers those "
                "that wait for an answer"
            ),
        ]
        | Annotated[list[MessageBody], Meta(max_length=MAX_MESSAGES)]
        | None
    ) = None
    text: Annotated[Content, doc("new raw text, without the chat template")] | None = None
    input_ids: Annotated[TokenIds, doc("new token ids")] | None = None
    tools: (
        Annotated[Tools, doc("functions that answers may call, from the first turn on")] | None
    ) = None


class TurnFields(InputFields, frozen=True, kw_only=True):
    """One turn; with `continue` it has no input."""

    turn_id: Annotated[Id, doc("yours; sent again, it is the same turn")] | None = None
    continues: Annotated[bool, doc("no input: go on from the last answer")] = msgspec.field(
        name="continue", default=False
    )
    tool_choice: Annotated[ToolChoice, doc("which tools the answer may or must call")] = "auto"
    parallel_tool_calls: Annotated[bool, doc("false: one call at most")] = True
    sampling: Annotated[SamplingBody, doc("see below")] | None = None
    generate: Annotated[bool, doc("false: compute the input, answer nothing")] = True
    queue: Annotated[bool, doc("false: refuse instead of waiting behind a running turn")] = True
    priority: Annotated[
        Priority,
        doc("each level is worth ten seconds of waiting; above your key's ceiling it is lowered"),
    ] = 0
    on_disconnect: (
        Annotated[
            OnDisconnect,
            doc("when the last reader goes; sockets `detach`, plain HTTP `cancel`"),
        ]
        | None
    ) = None


class TurnBody(TurnFields, frozen=True, kw_only=True):
    """Body of `POST /v1/sessions/{id}/turns`."""

    instead: ClassVar = {
        **InputFields.instead,
        "stream": "send the header Accept: text/event-stream",
    }


class DraftFields(InputFields, frozen=True, kw_only=True):
    """What the next turn would be if it were sent now."""

    draft_id: Annotated[Id, doc("yours; null, without an input: drop the draft")] | None


class DraftBody(DraftFields, frozen=True, kw_only=True):
    """Body of `POST /v1/sessions/{id}/draft`."""


class OpenBody(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/sessions`."""

    id: Annotated[Id, doc("none: made by the server")] | None = None
    model: Annotated[str, Meta(max_length=256, description="must be the one served")] | None = None
    instructions: Annotated[Content, doc("the system message before `messages`")] | None = None
    messages: (
        Annotated[
            list[MessageBody],
            Meta(max_length=MAX_MESSAGES, description="the beginning; context of the first turn"),
        ]
        | None
    ) = None
    ttl_s: TtlS | None = None
    metadata: Annotated[Metadata, doc("yours; shown with the session")] | None = None
    pinned: Annotated[
        bool,
        doc(
            "pressure does not take the KV of the session at rest, within `--pinned-fraction`, "
            "which all owners share; a running turn may be retracted; refused unless that is set"
        ),
    ] = False
    history: (
        Annotated[
            Literal["append", "template"],
            doc(
                "render new messages only, or the whole conversation each turn; none: append "
                "wherever the chat template allows it"
            ),
        ]
        | None
    ) = None


class UpdateBody(Body, frozen=True, kw_only=True):
    """Body of `PATCH /v1/sessions/{id}`; what is absent stays."""

    ttl_s: TtlS | None = None
    metadata: Annotated[Metadata, doc("replaces what there is")] | None = None
    pinned: (
        Annotated[
            bool, doc("from the next turn on, as when it is opened; refused while a turn runs")
        ]
        | None
    ) = None


class CancelBody(Body, frozen=True, kw_only=True):
    """Body of a cancel. `keep_partial` false leaves the session as it was before the turn."""

    keep_partial: Annotated[bool, doc(_KEEP_PARTIAL)] = True


class SessionAuth(ClientFrame, frozen=True, kw_only=True, tag="session.auth"):
    """First message of a client that could not send a header."""

    token: Annotated[str, Meta(min_length=1, max_length=512)]


class TurnCreate(TurnFields, frozen=True, kw_only=True, tag_field="type", tag="turn.create"):
    """Run one turn."""


class TurnCancel(ClientFrame, frozen=True, kw_only=True, tag="turn.cancel"):
    """Cancel one turn; without an id, the running one."""

    turn_id: Annotated[Id, doc("none: the running one")] | None = None
    keep_partial: Annotated[bool, doc(_KEEP_PARTIAL)] = True


class TurnDraft(DraftFields, frozen=True, kw_only=True, tag_field="type", tag="turn.draft"):
    """Say what the next turn would be if it were sent now; answered by `turn.drafted`."""


class SessionUpdate(UpdateBody, frozen=True, kw_only=True, tag_field="type", tag="session.update"):
    """Change settings of the session; answered by `session.updated`."""


class RewindBody(Body, frozen=True, kw_only=True):
    """Body of a rewind; refused while a turn runs."""

    to_item: Annotated[ItemId, doc("the last item that stays; null: none does")] | None


class ForkBody(Body, frozen=True, kw_only=True):
    """Body of a fork; refused while a turn runs."""

    at_item: Annotated[ItemId, doc("the last item of the fork; none: all of them")] | None = None
    id: Annotated[Id, doc("of the new session; none: made by the server")] | None = None


class EditBody(Body, frozen=True, kw_only=True):
    """Body of an edit: the item's new text. The items behind it go."""

    content: Content


class SessionRewind(RewindBody, frozen=True, kw_only=True, tag_field="type", tag="session.rewind"):
    """Go back to an item; answered by `session.rewound`."""


class SessionFork(ForkBody, frozen=True, kw_only=True, tag_field="type", tag="session.fork"):
    """Open a session with this conversation; answered by `session.forked`."""


class SessionCool(ClientFrame, frozen=True, kw_only=True, tag="session.cool"):
    """Leave the session's KV to the radix tree; answered by `session.state` if it had any."""


class SessionWarm(ClientFrame, frozen=True, kw_only=True, tag="session.warm"):
    """Bring back what is kept of the session's KV outside of the pools; never answered."""


class ItemEdit(EditBody, frozen=True, kw_only=True, tag_field="type", tag="item.edit"):
    """Give an item another text; answered by `item.edited`."""

    item_id: ItemId


class SessionClose(ClientFrame, frozen=True, kw_only=True, tag="session.close"):
    """Close the session; its last frame is `session.closed`."""


class Ping(ClientFrame, frozen=True, kw_only=True, tag="ping"):
    """Application ping, for clients that cannot send or see ping frames."""

    t: Annotated[float, Meta(ge=-1e300, le=1e300)] | None = None


class Ack(ClientFrame, frozen=True, kw_only=True, tag="ack"):
    """The client has processed everything up to `seq`."""

    seq: Annotated[int, Meta(ge=0, le=MAX_SEQ)]


ClientMessage = (
    SessionAuth
    | TurnCreate
    | TurnCancel
    | TurnDraft
    | SessionUpdate
    | SessionRewind
    | SessionFork
    | SessionCool
    | SessionWarm
    | ItemEdit
    | SessionClose
    | Ping
    | Ack
)


def decode(payload: bytes | str, kind: type[BodyT]) -> BodyT:
    """Parse and validate one body.

    Raises:
        InvalidRequest: it is not JSON, or not what the schema of `kind` says.
    """
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise to_invalid_request(error, kind) from None


def turn_request(
    fields: TurnFields, *, defaults: SamplingParams, on_disconnect: OnDisconnect
) -> TurnRequest:
    """Convert a client's turn; `defaults` and `on_disconnect` fill the fields it left out.

    Raises:
        InvalidRequest: not exactly one input, or a combination without meaning.
    """
    sampling = fields.sampling or SamplingBody()
    params = sampling_params(sampling, defaults=defaults)
    if not fields.generate:
        params = msgspec.structs.replace(params, max_tokens=0, min_tokens=0)
    return TurnRequest(
        turn_id=fields.turn_id or new_turn_id(),
        input=_continued_input(fields) if fields.continues else _turn_input(fields),
        sampling=params,
        text=replace(
            text_options(sampling),
            may_call=fields.tool_choice != "none",
            is_one_call=not fields.parallel_tool_calls,
            must_call=must_call(fields.tool_choice),
        ),
        priority=fields.priority,
        queue=fields.queue,
        on_disconnect=fields.on_disconnect or on_disconnect,
    )


def draft_request(fields: DraftFields, *, defaults: SamplingParams) -> TurnRequest | None:
    """Return the turn that a client would send now, under the id of the draft; None drops the
    draft.

    Raises:
        InvalidRequest: not exactly one input, or one without an id.
    """
    if fields.draft_id is None:
        if any(getattr(fields, name) is not None for name in _INPUTS):
            raise InvalidRequest("A draft with an input needs an id.", param="draft_id")
        return None
    return TurnRequest(fields.draft_id, _turn_input(fields), defaults)


def sampling_params(body: SamplingBody, *, defaults: SamplingParams) -> SamplingParams:
    """Return `defaults` with the fields that the client set.

    Raises:
        InvalidRequest: `min_tokens` above `max_tokens`, logprobs asked for in part, or several
            grammars.
    """
    changes: dict[str, object] = {
        name: value
        for name in SamplingParams.__struct_fields__
        if (value := getattr(body, name)) is not None
    }
    if any(each is not None for each in (body.json_schema, body.regex, body.grammar)):
        changes["grammar"] = grammars.only(
            {
                "sampling.json_schema": grammars.of_schema(
                    body.json_schema, "sampling.json_schema"
                ),
                "sampling.regex": grammars.of_regex(body.regex, "sampling.regex"),
                "sampling.grammar": grammars.of_lark(body.grammar, "sampling.grammar"),
            }
        )
    if body.top_k is not None:
        # Clients send -1 for "no limit", which is 0 here.
        changes["top_k"] = max(body.top_k, 0)
    if body.logit_bias is not None:
        changes["logit_bias"] = tuple((int(k), float(v)) for k, v in body.logit_bias.items())
    if body.stop_token_ids is not None:
        changes["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="sampling.top_logprobs")
    params = msgspec.structs.replace(defaults, **changes)
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens is above max_tokens.", param="sampling.min_tokens")
    return params


def text_options(sampling: SamplingBody) -> TextOptions:
    """Return how the client wants tokens to become text."""
    stop = sampling.stop if sampling.stop is not None else ()
    return TextOptions(
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        keep_stop=bool(sampling.keep_stop),
        skip_special_tokens=sampling.skip_special_tokens is not False,
    )


def chat_messages(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """Convert message bodies to core messages; join a content given in parts."""
    return tuple(
        Message(
            role=body.role,
            content=_text_of(body.content),
            tool_calls=tuple(ToolCall(c.id, c.name, c.arguments) for c in body.tool_calls or ()),
            tool_call_id=body.tool_call_id or "",
            reasoning=body.reasoning or "",
        )
        for body in bodies
    )


def _text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _continued_input(fields: TurnFields) -> ContinueInput:
    if any(getattr(fields, name) is not None for name in (*_INPUTS, "tools")):
        raise InvalidRequest("A turn that continues an answer has no input.", param="continue")
    return ContinueInput()


def _turn_input(fields: InputFields) -> TurnInput:
    given = [name for name in _INPUTS if getattr(fields, name) is not None]
    if len(given) != 1:
        raise InvalidRequest("Give exactly one of input, text and input_ids.", param="input")
    tools = tool_texts(fields.tools or ())
    if fields.input is not None:
        if isinstance(fields.input, str):
            return ChatInput((Message(role="user", content=fields.input),), tools=tools)
        return ChatInput(chat_messages(fields.input), tools=tools)
    if tools:
        raise InvalidRequest("Tools come with input, which is messages.", param="tools")
    if fields.text is not None:
        return TextInput(fields.text)
    assert fields.input_ids is not None, "one of three was given"
    return TokenInput(tuple(fields.input_ids))
