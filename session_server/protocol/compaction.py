"""Make the window from which a conversation goes on once it was compacted, and read it again.

The window is three messages at most, in an order that every chat template takes: those of the
system with which the conversation began, the newest ones of its user, and what the model wrote
when it was asked for a summary. A client carries it as the content of one item, which is opaque
but no secret: base64 of what the client could read anyway.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from session_server.core.errors import InvalidRequest
from session_server.core.session_events import Message

MAX_SUMMARY_TOKENS: Final = 4096
"""Of what the model writes, thoughts included."""

SUMMARY_DIVISOR: Final = 4
"""A summary takes at most this part of the longest context."""

MAX_SUMMARY_CHARS: Final = 1 << 16
MAX_KEPT_BYTES: Final = 1 << 16
"""UTF-8 of the user's messages that stay, and as much again for those of the system."""

_VERSION: Final = "compaction.v1:"
_REQUEST: Final = (
    "Write a summary of our conversation so far. It goes on with nothing but your summary and my "
    "latest messages, so say what I asked for, what was decided and done, which facts, names and "
    "results matter, and what is still to do. Call no tools, and write nothing but the summary."
)
_SUMMARY: Final = "Summary of our conversation so far:\n\n"
_NOTHING_KEPT: Final = "What has been said so far?"
_GAP: Final = "\n\n"

_Said = tuple[Literal["system", "developer", "user", "assistant"], str]
_Window = Annotated[list[_Said], Meta(max_length=3)]


def num_summary_tokens(context_len: int) -> int:
    """Return how many tokens a summary may take where contexts have up to so many."""
    return max(1, min(MAX_SUMMARY_TOKENS, context_len // SUMMARY_DIVISOR))


def asking_summary(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation at whose end the user asks for its summary."""
    if messages and messages[-1].role == "user":
        # Many templates take no two messages of a user in a row.
        asked = Message("user", messages[-1].content + _GAP + _REQUEST)
        return (*messages[:-1], asked)
    return (*messages, Message("user", _REQUEST))


def check_compactable(messages: Sequence[Message]) -> None:
    """Reject a conversation of which nothing can be left out. Raises InvalidRequest."""
    if not messages:
        text = "There is nothing to compact: give input or previous_response_id."
        raise InvalidRequest(text, param="input")
    if sum(_num_bytes(message) for message in _opening(messages)) > MAX_KEPT_BYTES:
        text = f"Its first messages of the system are above {MAX_KEPT_BYTES} bytes, and they stay."
        raise InvalidRequest(f"{text} Give them as instructions.", param="input")


def window_of(
    messages: Sequence[Message], summary: str, *, context_len: int
) -> tuple[Message, ...]:
    """Return what stands for a conversation from here on.

    Of the user's messages the newest stay as they are, as many whole ones as take a byte for each
    token of the longest context, and `MAX_KEPT_BYTES`.
    """
    system = _opening(messages)
    kept: list[str] = []
    room = min(MAX_KEPT_BYTES, context_len)
    for message in reversed(messages):
        if message.role == "user":
            room -= _num_bytes(message)
            if room < 0:
                break
            kept.append(message.content)
    said = _GAP.join(reversed(kept)) or _NOTHING_KEPT
    window = [
        Message("user", said),
        Message("assistant", _SUMMARY + summary.strip()[:MAX_SUMMARY_CHARS]),
    ]
    if system:
        text = _GAP.join(message.content for message in system)
        window.insert(0, Message(system[0].role, text))
    return tuple(window)


def encode_window(window: Sequence[Message]) -> str:
    """Return a window as the content of an item."""
    said = [(message.role, message.content) for message in window]
    return _VERSION + base64.b64encode(msgspec.msgpack.encode(said)).decode("ascii")


def decode_window(content: str, param: str) -> Iterator[Message]:
    """Yield the messages of a window. Raises InvalidRequest for what is none; `param` names it."""
    try:
        encoded = base64.b64decode(content.removeprefix(_VERSION), validate=True)
        said: list[_Said] = msgspec.msgpack.decode(encoded, type=_Window)
        if not content.startswith(_VERSION):
            raise ValueError("of another version")
    except (ValueError, msgspec.DecodeError) as error:
        text = "encrypted_content is not the content of a compaction of this server."
        raise InvalidRequest(text, param=param) from error
    for role, text in said:
        yield Message(role, text)


def _opening(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of the system with which a conversation begins."""
    return list(takewhile(lambda message: message.role in ("system", "developer"), messages))


def _num_bytes(message: Message) -> int:
    return len(message.content.encode())
