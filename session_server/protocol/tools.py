"""Define tools and calls as OpenAI's APIs write them, for every dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from session_server.core.session_events import ToolCall, ToolCallDelta

T = TypeVar("T")

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 128
MAX_CALL_ID_CHARS: Final = 256
MAX_ARGUMENTS_CHARS: Final = 1 << 20
MAX_DESCRIPTION_CHARS: Final = 1 << 16

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,64}$(?!\n)")]
CallId = Annotated[str, Meta(max_length=MAX_CALL_ID_CHARS)]
Arguments = Annotated[
    str, Meta(max_length=MAX_ARGUMENTS_CHARS, description="JSON, as the answer has it")
]


class FunctionBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that an answer may call. `parameters` is its JSON schema."""

    name: ToolName
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A tool; functions are the only ones."""

    function: FunctionBody


class FunctionCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """The function that a call is of."""

    name: str
    arguments: Arguments


class ToolCallBody(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A call in an answer."""

    id: CallId
    function: FunctionCallBody


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a piece adds to a call; its first has the name."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCallDeltaBody(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of call number `index`; its first has `id` and `type`."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function by its name."""

    name: ToolName


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The tool that the answer must call."""

    function: NamedFunction


class FunctionChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The function that the answer must call."""

    name: ToolName


ToolChoice = Literal["auto", "none", "required"] | NamedTool
ToolOrFunction = Literal["auto", "none", "required"] | FunctionChoice
"""The same as Responses and Realtime write it."""

Tools = Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)]


def tool_texts(tools: Sequence[ToolBody]) -> tuple[str, ...]:
    """Return tools as the JSON texts that chat templates get."""
    return tuple(msgspec.json.encode(tool).decode() for tool in tools)


def must_call(choice: ToolChoice | ToolOrFunction | None) -> str | None:
    """Return the name of the tool that an answer must call; "": any of them, None: it need not."""
    match choice:
        case NamedTool(function=NamedFunction(name=name)) | FunctionChoice(name=name):
            return name
        case _:
            return "" if choice == "required" else None


def tools_written(
    tools: list[T] | None, choice: ToolChoice | ToolOrFunction | None, *, takes_tools: bool
) -> list[T] | None:
    """Return the tools that a request is answered with. Clients that send some with every request
    have none where the model's chat template writes none (`takes_tools` False), unless the answer
    must call one: such a turn is refused."""
    return tools if takes_tools or must_call(choice) is not None else None


def calls_of(bodies: Sequence[ToolCallBody]) -> tuple[ToolCall, ...]:
    """Return the calls of a message."""
    return tuple(ToolCall(b.id, b.function.name, b.function.arguments) for b in bodies)


def call_bodies(calls: Sequence[ToolCall]) -> tuple[ToolCallBody, ...]:
    """Return the wire form of calls."""
    return tuple(
        ToolCallBody(
            id=call.id, function=FunctionCallBody(name=call.name, arguments=call.arguments)
        )
        for call in calls
    )


def call_delta_bodies(pieces: Sequence[ToolCallDelta]) -> tuple[ToolCallDeltaBody, ...]:
    """Return the wire form of pieces of calls."""
    return tuple(map(_delta_body, pieces))


def _delta_body(piece: ToolCallDelta) -> ToolCallDeltaBody:
    if not piece.id:
        return ToolCallDeltaBody(
            index=piece.index, function=FunctionDelta(arguments=piece.arguments)
        )
    function = FunctionDelta(name=piece.name, arguments=piece.arguments)
    return ToolCallDeltaBody(index=piece.index, id=piece.id, type="function", function=function)
