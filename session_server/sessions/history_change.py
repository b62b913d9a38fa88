"""What one turn, rewind or edit leaves of a conversation, and what it adds.

Conversations that apply the changes of another one, in order, are equal to it, token for token.
They are what the log of a session consists of, so a field is only ever added at the end, with a
default, and none changes what it means.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from session_server.core.session_events import ConversationItem


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


def apply_tokens(tokens: array[int], change: HistoryChange) -> None:
    """Change the tokens of a conversation as those of another one have that was equal.

    Raises:
        ValueError: it was another one, which had more than this one has.
    """
    if change.num_kept > len(tokens):
        raise ValueError(f"{change.num_kept} tokens stay of {len(tokens)}")
    del tokens[change.num_kept :]
    tokens.frombytes(np.frombuffer(change.tokens, "<i4").astype(np.int32).tobytes())
