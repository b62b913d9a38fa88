"""Estimate the host memory, in bytes, that sessions take: the unit of every limit in bytes.

The constants are the bytes that CPython allocates for one object of each kind, the allocator's
rounding included; `tests/sessions/test_footprint.py` checks them against the interpreter. Each
estimate depends on the object alone, so that the bytes released equal the bytes taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from session_server.core.sampling import SamplingParams, TokenLogprob
from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    ItemEdited,
    Message,
    Outcome,
    SessionClosed,
    SessionDraining,
    SessionEntry,
    SessionForked,
    SessionRewound,
    SessionStateChanged,
    SessionUpdated,
    TextInput,
    TokenInput,
    ToolCall,
    ToolCallDelta,
    TurnCancelled,
    TurnCompleted,
    TurnCreated,
    TurnDelta,
    TurnFailedEntry,
    TurnInput,
    TurnProgress,
    TurnRequest,
)

SESSION_BYTES: Final = 2944
"""A session without turns: identity, settings, an empty journal and an empty transcript."""

TURN_BYTES: Final = 2560
"""A turn that has not ended, without its input and its answer."""

ENTRY_BYTES: Final = 288
OUTCOME_BYTES: Final = 704
ITEM_BYTES: Final = 192
MESSAGE_BYTES: Final = 64
CALL_BYTES: Final = 64
"""A call or a piece of one, without its texts."""

METADATA_ENTRY_BYTES: Final = 40
BIAS_BYTES: Final = 136
GRAMMAR_BYTES: Final = 48
TOKEN_BYTES: Final = 40
"""One token id in a tuple or a list. An array takes four; its size is measured."""

LOGPROB_BYTES: Final = 128
TOP_LOGPROB_BYTES: Final = 136


TEXT_BYTES: Final = 56
WIDE_CHAR_BYTES: Final = 6
"""A character of a text that is not pure ASCII: its code point, and the UTF-8 that the interpreter
keeps beside it once the text was written to a socket."""


def text_bytes(text: str) -> int:
    """Return the bytes of one text."""
    return TEXT_BYTES + len(text) * (1 if text.isascii() else WIDE_CHAR_BYTES)


def message_bytes(message: Message) -> int:
    """Return the bytes of one chat message."""
    return MESSAGE_BYTES + _said_bytes(message)


def item_bytes(turn_id: str, message: Message) -> int:
    """Return the bytes of one item of a conversation, and of a message beside it, which shares its
    texts."""
    return ITEM_BYTES + MESSAGE_BYTES + text_bytes(turn_id) + _said_bytes(message)


def call_bytes(calls: Sequence[ToolCall | ToolCallDelta]) -> int:
    """Return the bytes of calls, or pieces of calls."""
    if not calls:
        return 0
    texts = (text for call in calls for text in (call.id, call.name, call.arguments))
    return CALL_BYTES * len(calls) + sum(map(text_bytes, texts))


def _said_bytes(message: Message) -> int:
    num_bytes = text_bytes(message.content) + call_bytes(message.tool_calls)
    return num_bytes + _optional_bytes(message.tool_call_id) + _optional_bytes(message.reasoning)


def _optional_bytes(text: str) -> int:
    """Return the bytes of a text that mostly is the empty one, which all share."""
    return text_bytes(text) if text else 0


def metadata_bytes(metadata: Mapping[str, str]) -> int:
    """Return the bytes of a session's metadata."""
    texts = (*metadata.keys(), *metadata.values())
    return METADATA_ENTRY_BYTES * len(metadata) + sum(map(text_bytes, texts))


def logprob_bytes(logprobs: Sequence[TokenLogprob]) -> int:
    """Return the bytes of scored positions."""
    if not logprobs:
        return 0
    num_tops = sum(len(logprob.top) for logprob in logprobs)
    return LOGPROB_BYTES * len(logprobs) + TOP_LOGPROB_BYTES * num_tops


def max_score_bytes(sampling: SamplingParams, context_len: int) -> int:
    """Return the most bytes that the logprobs of a turn take; `context_len` counts its prompt."""
    num_scored = sampling.max_tokens if sampling.logprobs else 0
    if sampling.prompt_logprobs_from is not None:
        num_scored += max(0, context_len - sampling.prompt_logprobs_from)
    return num_scored * (LOGPROB_BYTES + TOP_LOGPROB_BYTES * sampling.top_logprobs)


def input_bytes(turn_input: TurnInput) -> int:
    """Return the bytes of a turn's input."""
    match turn_input:
        case ChatInput(messages=messages, tools=tools):
            return sum(map(message_bytes, messages)) + sum(map(text_bytes, tools))
        case TextInput(text=text):
            return text_bytes(text)
        case TokenInput(token_ids=token_ids):
            return TOKEN_BYTES * len(token_ids)
        case ContinueInput():
            return 0
        case _:
            assert_never(turn_input)


def token_bytes(num_tokens: int) -> int:
    """Return the bytes of `num_tokens` token ids in a tuple or a list."""
    return TOKEN_BYTES * num_tokens


def request_bytes(request: TurnRequest) -> int:
    """Return the bytes of a turn's request, `TURN_BYTES` included."""
    num_bytes = TURN_BYTES + input_bytes(request.input) + _sampling_bytes(request.sampling)
    return num_bytes + sum(map(text_bytes, request.text.stop))


def entry_bytes(entry: SessionEntry) -> int:
    """Return the bytes of one journal entry."""
    match entry:
        case TurnDelta(text=text, token_ids=token_ids, logprobs=logprobs):
            num_bytes = text_bytes(text) + TOKEN_BYTES * len(token_ids)
            num_bytes += call_bytes(entry.tool_calls) + _optional_bytes(entry.reasoning)
            return ENTRY_BYTES + num_bytes + logprob_bytes(logprobs)
        case TurnCompleted(outcome=outcome) | TurnCancelled(outcome=outcome):
            return ENTRY_BYTES + _outcome_bytes(outcome)
        case TurnFailedEntry(message=message, outcome=outcome):
            return ENTRY_BYTES + text_bytes(message) + _outcome_bytes(outcome)
        case SessionUpdated(metadata=metadata):
            return ENTRY_BYTES + metadata_bytes(metadata)
        case (
            TurnCreated()
            | TurnProgress()
            | SessionStateChanged()
            | SessionRewound()
            | SessionForked()
            | ItemEdited()
            | SessionDraining()
            | SessionClosed()
        ):
            return ENTRY_BYTES
        case _:
            assert_never(entry)


def _outcome_bytes(outcome: Outcome) -> int:
    num_bytes = OUTCOME_BYTES + text_bytes(outcome.text) + TOKEN_BYTES * len(outcome.token_ids)
    num_bytes += call_bytes(outcome.tool_calls) + _optional_bytes(outcome.reasoning)
    return num_bytes + logprob_bytes(outcome.logprobs) + logprob_bytes(outcome.prompt_logprobs)


def _sampling_bytes(sampling: SamplingParams) -> int:
    num_ids = len(sampling.stop_token_ids)
    grammar = sampling.grammar
    num_bytes = 0
    if grammar is not None:
        num_bytes = GRAMMAR_BYTES + text_bytes(grammar.text) + text_bytes(grammar.calls)
    return num_bytes + TOKEN_BYTES * num_ids + BIAS_BYTES * len(sampling.logit_bias)
