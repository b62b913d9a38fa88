"""Tell whether a client repeats what was said, however it spells the arguments of calls.

What was thought need not be repeated: most clients send the text and the calls of an answer alone.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec

from session_server.core.session_events import ConversationItem, Message, ToolCall

DIGEST_BYTES: Final = 16


def agrees(item: ConversationItem, message: Message) -> bool:
    """Return whether a message says what an item holds."""
    same = item.role == message.role and item.content == message.content
    if not same or item.tool_call_id != message.tool_call_id:
        return False
    if message.reasoning and message.reasoning != item.reasoning:
        return False
    if item.tool_calls == message.tool_calls:
        return True
    return len(item.tool_calls) == len(message.tool_calls) and all(
        (one.id, one.name) == (other.id, other.name)
        and _value(one.arguments) == _value(other.arguments)
        for one, other in zip(item.tool_calls, message.tool_calls, strict=True)
    )


def digests_of(messages: Sequence[Message], tools: Sequence[str], *, hint: str) -> bytes:
    """Return, for each message, a digest of the conversation up to it, one behind the other.
    Conversations with other tools or another hint are others."""
    digest = _digest(b"", hint, *tools)
    digests = bytearray()
    for message in messages:
        digest = next_digest(digest, message)
        digests += digest
    return bytes(digests)


def num_common(one: bytes, other: bytes) -> int:
    """Return how many leading messages two conversations have in common, by their digests one
    behind the other. Few of them are looked at."""
    size = DIGEST_BYTES
    indexes = range(min(len(one), len(other)) // size)
    return bisect_left(
        indexes,
        True,
        key=lambda i: one[i * size : (i + 1) * size] != other[i * size : (i + 1) * size],
    )


def next_digest(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message."""
    calls = (part for call in message.tool_calls for part in _parts(call))
    return _digest(digest, message.role, message.tool_call_id, message.content, *calls)


def _parts(call: ToolCall) -> tuple[str, str, str]:
    return call.id, call.name, _value(call.arguments)


def _digest(before: bytes, *texts: str) -> bytes:
    state = hashlib.blake2b(before, digest_size=DIGEST_BYTES)
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        state.update(len(encoded).to_bytes(8, "little"))
        state.update(encoded)
    return state.digest()


def _value(arguments: str) -> str:
    """Return the one spelling of a JSON value; what is no JSON is its own."""
    try:
        value = _DECODER.decode(arguments)
        return msgspec.json.encode(value, order="sorted").decode()
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return arguments


def _number(spelled: str) -> int | float:
    number = float(spelled)
    # A larger one may have hundreds of digits, and is no integer that anybody has spelled.
    return int(number) if abs(number) < 1 << 53 and number.is_integer() else number


_DECODER = msgspec.json.Decoder(float_hook=_number)
