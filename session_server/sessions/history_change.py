"""What one turn, rewind or edit leaves of a conversation, and what it adds.

Conversations that apply the changes of another one, in order, are equal to it, token for token.
They are what the log of a session consists of, so a field is only ever added at the end, with a
default, and none changes what it means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from session_server.core.session_events import ConversationItem

TOKEN_BYTES: Final = 4


class ItemsChange(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Keep the first `num_kept` items, add others. `num_made`: ids given to items so far."""

    num_kept: int
    added: tuple[ConversationItem, ...]
    num_made: int


class AnswersChange(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Keep where the first `num_kept` answers end, add others; see `Answers`."""

    num_kept: int
    indexes: tuple[int, ...]
    ends: tuple[int, ...]


class HistoryChange(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Keep the first `num_kept` tokens, add others, and say what the next prompt depends on.

    `tokens`: int32 [n], little-endian. `tools`: None if they are as before. `num_open`: the last
    items, which the next turn renders. `answer_len`, `is_end_replaced`: see `Transcript`.
    """

    num_kept: int
    tokens: bytes
    items: ItemsChange
    answers: AnswersChange
    tools: tuple[str, ...] | None
    answer_len: int
    is_end_replaced: bool
    num_open: int


def whole_of(changes: Sequence[HistoryChange]) -> HistoryChange:
    """Return one change that leaves the same as these do, one after another; it keeps nothing.

    Raises:
        ValueError: they do not follow each other: one keeps more than there is.
    """
    tokens, items = bytearray(), list[ConversationItem]()
    indexes, ends = list[int](), list[int]()
    tools: tuple[str, ...] = ()
    for change in changes:
        num_kept = change.num_kept * TOKEN_BYTES
        places = (num_kept, tokens), (change.items.num_kept, items), (change.answers.num_kept, ends)
        if any(kept > len(there) for kept, there in places):
            raise ValueError("a change keeps more than there is")
        del tokens[num_kept:], items[change.items.num_kept :]
        del indexes[change.answers.num_kept :], ends[change.answers.num_kept :]
        tokens += change.tokens
        items += change.items.added
        indexes += change.answers.indexes
        ends += change.answers.ends
        tools = tools if change.tools is None else change.tools
    last = changes[-1]
    return HistoryChange(
        0,
        bytes(tokens),
        ItemsChange(0, tuple(items), last.items.num_made),
        AnswersChange(0, tuple(indexes), tuple(ends)),
        tools,
        last.answer_len,
        last.is_end_replaced,
        last.num_open,
    )
