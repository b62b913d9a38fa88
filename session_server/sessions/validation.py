"""Check the bounds of client requests before anything changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, assert_never

from session_server.core.errors import InvalidRequest
from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    Message,
    TextInput,
    TextOptions,
    TokenInput,
    TurnInput,
    TurnRequest,
)
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.views import OpenRequest
from session_server.text.chat_encoder import check_roles
from session_server.text.tokenizer import check_token_ids

MAX_ID_CHARS: Final = 64
MIN_TTL_S: Final = 0.001
_MAX_KEY_CHARS: Final = 64
_MAX_VALUE_CHARS: Final = 512
_CHARS_PER_TOKEN: Final = 4
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,64}", re.ASCII)
_RESERVED_IDS: Final = frozenset({"new", ".", ".."})
"""A socket to "new" opens a session; clients and proxies remove "." and ".." from paths."""


def check_open(request: OpenRequest, limits: SessionLimits) -> None:
    """Reject a session whose options exceed the limits. Raises InvalidRequest."""
    if request.session_id is not None:
        check_session_id(request.session_id)
    if request.ttl_s is not None:
        check_ttl(request.ttl_s, limits)
    check_metadata(request.metadata, limits)
    check_messages(request.messages, limits)


def check_session_id(session_id: str) -> None:
    """Reject what is no session id. Raises InvalidRequest."""
    if not _SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(
            f"a session id has 1 to {MAX_ID_CHARS} characters of A-Z a-z 0-9 _ . : -", param="id"
        )
    if session_id in _RESERVED_IDS:
        raise InvalidRequest("new, . and .. are no session ids", param="id")


def check_ttl(ttl_s: float, limits: SessionLimits) -> None:
    """Reject a time to live outside its bounds, and NaN. Raises InvalidRequest."""
    if not MIN_TTL_S <= ttl_s <= limits.max_ttl_s:
        raise InvalidRequest(f"ttl_s must lie in (0, {limits.max_ttl_s:g}]", param="ttl_s")


def check_metadata(metadata: Mapping[str, str], limits: SessionLimits) -> None:
    """Reject metadata with too many or too long entries. Raises InvalidRequest."""
    if len(metadata) > limits.max_metadata:
        raise InvalidRequest(f"metadata has at most {limits.max_metadata} keys", param="metadata")
    for key, value in metadata.items():
        if not 0 < len(key) <= _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
            raise InvalidRequest(
                f"metadata keys have 1 to {_MAX_KEY_CHARS} characters, values at most "
                f"{_MAX_VALUE_CHARS}",
                param="metadata",
            )


def check_turn(request: TurnRequest, limits: SessionLimits, vocab_size: int) -> None:
    """Reject a turn that no session could run. Raises InvalidRequest."""
    if not 0 < len(request.turn_id) <= MAX_ID_CHARS or not request.turn_id.isprintable():
        raise InvalidRequest(
            f"a turn id has 1 to {MAX_ID_CHARS} printable characters", param="turn_id"
        )
    _check_input(request.input, limits, vocab_size)
    _check_text_options(request.text, limits)
    sampling = request.sampling
    check_token_ids(sampling.stop_token_ids, vocab_size, param="stop_token_ids")
    biased = [token_id for token_id, _ in sampling.logit_bias]
    check_token_ids(biased, vocab_size, param="logit_bias")


def _check_input(turn_input: TurnInput, limits: SessionLimits, vocab_size: int) -> None:
    match turn_input:
        case ChatInput(messages=messages, tools=tools):
            check_messages(messages, limits, num_others=sum(map(len, tools)))
            if len(tools) > limits.max_tools:
                raise InvalidRequest(f"at most {limits.max_tools} tools", param="tools")
        case TextInput(text=text):
            _check_size(len(text), limits)
        case TokenInput(token_ids=token_ids):
            _check_size(len(token_ids) * _CHARS_PER_TOKEN, limits)
            check_token_ids(token_ids, vocab_size)
        case ContinueInput():
            pass
        case _:
            assert_never(turn_input)


def check_messages(
    messages: tuple[Message, ...], limits: SessionLimits, *, num_others: int = 0
) -> None:
    """Reject too many or too long messages, and what no message of its role has. `num_others`:
    characters beside them. Raises InvalidRequest."""
    if len(messages) > limits.max_messages:
        raise InvalidRequest(f"at most {limits.max_messages} messages", param="input")
    check_roles(messages)
    for index, message in enumerate(messages):
        _check_parts(message, index, limits)
    _check_size(num_others + sum(message.num_chars for message in messages), limits)


def _check_parts(message: Message, index: int, limits: SessionLimits) -> None:
    if (message.tool_calls or message.reasoning) and message.role != "assistant":
        raise InvalidRequest("only an assistant calls and thinks", param=f"input[{index}]")
    if message.tool_call_id and message.role != "tool":
        raise InvalidRequest("only a tool answers a call", param=f"input[{index}].tool_call_id")
    if len(message.tool_calls) > limits.max_tools:
        raise InvalidRequest(
            f"a message has at most {limits.max_tools} calls", param=f"input[{index}].tool_calls"
        )


def _check_size(num_chars: int, limits: SessionLimits) -> None:
    if num_chars > limits.max_input_chars:
        raise InvalidRequest(
            f"the input exceeds {limits.max_input_chars} characters", param="input"
        )


def _check_text_options(options: TextOptions, limits: SessionLimits) -> None:
    if len(options.stop) > limits.max_stop_strings:
        raise InvalidRequest(f"at most {limits.max_stop_strings} stop strings", param="stop")
    for stop in options.stop:
        if not 0 < len(stop) <= limits.max_stop_chars:
            raise InvalidRequest(
                f"a stop string has 1 to {limits.max_stop_chars} characters", param="stop"
            )
