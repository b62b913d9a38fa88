"""Build what a chat template gets of a conversation, as `transformers` gives it to one.

Whatever a client wrote passes through `mark`, so that its characters can be told from the
template's own: contents, names, ids, what was thought, and every key and text inside of tools and
of the arguments of calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from session_server.core.errors import TokenizeFailed
from session_server.core.session_events import Message, ToolCall
from session_server.text.chat_template import Conversation

MAX_JSON_DEPTH: Final = 64
"""Levels of a tool, and of the arguments of a call; deeper arguments stay a text."""

_INT_END: Final = 1 << 63
"""Integers outside [-_INT_END, _INT_END) become floats: no message to a process has them."""

_NOT_JSON: Final = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError)

Mark = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class CallForm:
    """Describe how a template takes calls. `no_content`: the content of an answer with calls and no
    text. `has_objects`: arguments are values, not JSON text."""

    no_content: str | None = ""
    has_objects: bool = True


def conversation_of(
    messages: Sequence[Message],
    tools: Sequence[str],
    *,
    mark: Mark = str,
    form: CallForm = CallForm(),
) -> Conversation:
    """Return the messages and tools as values.

    Raises:
        TokenizeFailed: a tool is not JSON, or nested too deeply.
    """
    return Conversation(
        [_message(message, mark, form) for message in messages],
        [_tool(tool, mark) for tool in tools] or None,
    )


def _message(message: Message, mark: Mark, form: CallForm) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": mark(message.content)}
    if message.reasoning:
        values["reasoning_content"] = mark(message.reasoning)
    if message.tool_calls:
        values["content"] = values["content"] or form.no_content
        values["tool_calls"] = [_call(call, mark, form) for call in message.tool_calls]
    if message.tool_call_id:
        values["tool_call_id"] = mark(message.tool_call_id)
    return values


def _call(call: ToolCall, mark: Mark, form: CallForm) -> dict[str, Any]:
    arguments: Any = mark(call.arguments)
    if form.has_objects:
        with contextlib.suppress(*_NOT_JSON):
            arguments = _marked(msgspec.json.decode(call.arguments or "{}"), mark)
    function = {"name": mark(call.name), "arguments": arguments}
    return {"id": mark(call.id), "type": "function", "function": function}


def _tool(tool: str, mark: Mark) -> Any:
    try:
        return _marked(msgspec.json.decode(tool), mark)
    except _NOT_JSON as error:
        raise TokenizeFailed("a tool is no JSON, or nested too deeply", param="tools") from error


def _marked(value: Any, mark: Mark, depth: int = MAX_JSON_DEPTH) -> Any:
    """Return a JSON value with every text in it marked. Raises ValueError if it is too deep."""
    if depth == 0:
        raise ValueError("nested too deeply")
    match value:
        case str():
            return mark(value)
        case dict():
            return {mark(key): _marked(each, mark, depth - 1) for key, each in value.items()}
        case list():
            return [_marked(each, mark, depth - 1) for each in value]
        case int() if not -_INT_END <= value < _INT_END:
            return float(value)
        case _:
            return value
