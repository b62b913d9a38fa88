"""The fields of requests, answers and frames, as their types say them, for docs/protocol.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
from msgspec import inspect

from session_server.core.events import TurnTimings
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import ConversationItem, TextOptions
from session_server.protocol import (
    chat_completions,
    completions,
    frames,
    messages,
    realtime_messages,
    resources,
    responses,
    responses_socket,
    scores,
)
from tests.docs.wire_fields import fields_of, number

OBJECTS: tuple[type[msgspec.Struct], ...] = (
    frames.ItemBody,
    scores.LogprobBody,
    frames.UsageBody,
    TurnTimings,
    ConversationItem,
    resources.SessionBody,
    resources.TurnResultBody,
)


def turn_table() -> str:
    """Every field of a turn."""
    return _body_table(messages.TurnFields)


def message_table() -> str:
    """Every field of a message and of its parts."""
    return _body_table(messages.MessageBody) + "\n\n" + _body_table(messages.TextPart)


def session_table() -> str:
    """Every field of a session that is opened."""
    return _body_table(messages.OpenBody)


def chat_table() -> str:
    """Every field of a chat completion that is read."""
    return _body_table(chat_completions.ChatBody)


def completion_table() -> str:
    """Every field of a completion that is read."""
    return _body_table(completions.CompletionBody)


def response_table() -> str:
    """Every field of a response that is read."""
    return _body_table(responses.ResponseCreateBody)


def compaction_table() -> str:
    """Every field of a compaction that is read."""
    return _body_table(responses.CompactBody)


def realtime_table() -> str:
    """Every setting of a Realtime session."""
    return _body_table(realtime_messages.SessionSettingsBody)


def response_frame_table() -> str:
    """Every frame that a client of the WebSocket mode sends."""

    def rows() -> Iterator[str]:
        yield "| frame | fields beside those of a response | |"
        yield "|---|---|---|"
        for kind in get_args(responses_socket.SocketMessage):
            shared = responses.ResponseFields.__struct_fields__
            own = (f"`{field.name}`" for field in fields_of(kind) if field.name not in shared)
            about = " ".join((kind.__doc__ or "").split())
            yield f"| `{kind.__struct_config__.tag}` | {', '.join(own)} | {about} |"

    return "\n".join(rows())


def sampling_table() -> str:
    """Every field of `sampling`, with the default of a model that names none."""
    defaults = {**msgspec.structs.asdict(SamplingParams()), **_text_defaults()}

    def rows() -> Iterator[str]:
        yield "| field | what it takes | default | meaning |"
        yield "|---|---|---|---|"
        for field in fields_of(messages.SamplingBody):
            default = _default_text(defaults.get(field.name))  # of a grammar: none
            yield f"| `{field.name}` | {field.kind} | {default} | {field.about} |"

    return "\n".join(rows())


def frame_table() -> str:
    """Every frame of the server, with its fields and what they may be."""

    def rows() -> Iterator[str]:
        yield "| type | fields | meaning |"
        yield "|---|---|---|"
        for kind in get_args(frames.AnyServerFrame):
            described = inspect.type_info(kind)
            assert isinstance(described, inspect.StructType)
            yield f"| `{described.tag}` | {_fields_text(kind)} | {_first_words(kind)} |"

    return "\n".join(rows())


def object_table() -> str:
    """Every object that frames and answers hold."""

    def rows() -> Iterator[str]:
        yield "| object | fields | meaning |"
        yield "|---|---|---|"
        for kind in OBJECTS:
            name = kind.__name__.removesuffix("Body")
            yield f"| {name} | {_fields_text(kind)} | {_first_words(kind)} |"

    return "\n".join(rows())


def _body_table(kind: type[msgspec.Struct]) -> str:
    def rows() -> Iterator[str]:
        yield "| field | what it takes | default | meaning |"
        yield "|---|---|---|---|"
        described = inspect.type_info(kind)
        assert isinstance(described, inspect.StructType)
        if described.tag_field is not None:
            yield f"| `{described.tag_field}` | `{described.tag}` | | |"
        for field in fields_of(kind):
            default = "required" if field.is_required else _default_text(field.default)
            yield f"| `{field.name}` | {field.kind} | {default} | {field.about} |"

    return "\n".join(rows())


def _fields_text(kind: type[msgspec.Struct]) -> str:
    """Name the fields, with their values where they have but a few."""
    return ", ".join(
        f"`{field.name}` ({field.kind})" if field.is_choice else f"`{field.name}`"
        for field in fields_of(kind)
    )


def _default_text(value: Any) -> str:
    match value:
        case None | ():
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return number(value)
        case _:
            return f"`{value}`"


def _text_defaults() -> dict[str, Any]:
    options = TextOptions()
    return {
        "stop": options.stop,
        "keep_stop": options.keep_stop,
        "skip_special_tokens": options.skip_special_tokens,
    }


def _first_words(kind: type[msgspec.Struct]) -> str:
    return " ".join((kind.__doc__ or "").split()).replace("|", "\\|")
