"""Write what a turn asks as fields of a frame, and read what an answer has said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import msgspec

from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    Message,
    TextInput,
    TokenInput,
    ToolCall,
    TurnInput,
)


def input_fields(content: str | TurnInput) -> dict[str, object]:
    """Return what a turn asks; a string is one message of the user."""
    match content:
        case str():
            return {"input": [{"role": "user", "content": content}]}
        case ChatInput():
            fields: dict[str, object] = {"input": list(map(_message_body, content.messages))}
            if content.tools:
                fields["tools"] = [msgspec.Raw(tool.encode()) for tool in content.tools]
            return fields
        case TextInput():
            return {"text": content.text}
        case TokenInput():
            return {"input_ids": content.token_ids}
        case ContinueInput():
            return {"continue": True}
        case _:
            assert_never(content)


def _message_body(message: Message) -> dict[str, object]:
    body: dict[str, object] = {"role": message.role, "content": message.content}
    others = ("tool_calls", "tool_call_id", "reasoning")
    return body | {name: value for name in others if (value := getattr(message, name))}


def thought_and_calls(item: Mapping[str, Any]) -> tuple[str, tuple[ToolCall, ...]]:
    """Return what an answer has thought, and the tools that it has called."""
    calls = msgspec.convert(item.get("tool_calls", ()), tuple[ToolCall, ...])
    return item.get("reasoning", ""), calls
