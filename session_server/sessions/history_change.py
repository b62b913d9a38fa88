"""What one turn, rewind or edit leaves of a conversation, and what it adds.

Conversations that apply the changes of another one, in order, are equal to it, token for token.
They are what the log of a session consists of, so a field is only ever added at the end, with a
default, and none changes what it means.
"""

from __future__ import annotations

from array import array
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from session_server.core.session_events import ConversationItem

Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""What an int32 holds that counts something. Whoever reads another one refuses it."""

_End = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]


class ItemsChange(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Keep the first `num_kept` items, add others. `num_made`: ids given to items so far."""

    num_kept: Count
    added: tuple[ConversationItem, ...]
    num_made: Count


class AnswersChange(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Keep where the first `num_kept` answers end, add others; see `Answers`."""

    num_kept: Count
    indexes: tuple[Count, ...]
    ends: tuple[_End, ...]


class HistoryChange(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Keep the first `num_kept` tokens, add others, and say what the next prompt depends on.

    `tokens`: int32 [n], little-endian. `tools`: None if they are as before. `num_open`: the last
    items, which the next turn renders. `answer_len`, `is_end_replaced`: see `Transcript`.
    """

    num_kept: Count
    tokens: bytes
    items: ItemsChange
    answers: AnswersChange
    tools: tuple[str, ...] | None
    answer_len: Count
    is_end_replaced: bool
    num_open: Count


def apply_tokens(tokens: array[int], change: HistoryChange) -> None:
    """Change the tokens of a conversation as those of another one have that was equal.

    Raises:
        ValueError: it was another one, which had more than this one has.
    """
    if change.num_kept > len(tokens):
        raise ValueError(f"{change.num_kept} tokens stay of {len(tokens)}")
    del tokens[change.num_kept :]
    tokens.frombytes(np.frombuffer(change.tokens, "<i4").astype(np.int32).tobytes())
