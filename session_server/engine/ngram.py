"""Prompt lookup: propose as drafts what followed the last tokens where they occurred before.

Prompt lookup decoding (Saxena 2023): conversations repeat themselves, names, code, quotations,
so the longest earlier occurrence of the last few tokens is a free draft model.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cache.types import Tokens

WINDOW: Final = 16_384
"""Last tokens that are searched. That takes microseconds, and older text repeats less."""

MIN_MATCH: Final = 2
"""Shortest match, in tokens. A single token recurs by chance."""

MAX_MATCH: Final = 8

NEAR: Final = 1024
"""Last tokens that are searched first where the last one is frequent: in text that repeats itself
they hold the longest match already, and none further back is later."""

MANY_ENDS: Final = 256
"""With more ends than these, comparing every token of the text is faster than each end."""

_NOTHING: Final = np.empty(0, dtype=np.int32)


def look_up(tokens: Tokens, num_drafts: int) -> Tokens:
    """Return what followed the latest of the longest earlier occurrences of the last tokens.

    An occurrence that reaches the end of `tokens` is taken to repeat itself.

    Args:
        tokens: int32 [n], the text so far.
        num_drafts: how many tokens to propose.

    Returns:
        int32 [num_drafts], or [0] when the last `MIN_MATCH` tokens are new.
    """
    if len(tokens) <= MIN_MATCH or num_drafts <= 0:
        return _NOTHING
    length, end = _latest_longest(tokens)
    return np.resize(tokens[end + 1 :], num_drafts) if length >= MIN_MATCH else _NOTHING


def _latest_longest(tokens: Tokens) -> tuple[int, int]:
    """Return the length of the longest occurrence, `MAX_MATCH` at most, and the index at which the
    latest of that length ends; (0, 0) where the last of `tokens`, int32 [n], is new."""
    num_tokens, length = len(tokens), 1
    longest = min(MAX_MATCH, num_tokens - 1)
    is_end = tokens[:-1] == tokens[-1]
    num_ends = np.count_nonzero(is_end)
    if num_ends == 0:
        return 0, 0
    if num_ends > MANY_ENDS and num_tokens > NEAR:
        near_length, near_end = _latest_longest(tokens[-NEAR:])
        if near_length == MAX_MATCH:
            return MAX_MATCH, num_tokens - NEAR + near_end
    while num_ends > MANY_ENDS and length < longest:
        # Element i is the end i + length: an earlier one has no token so far before it.
        longer = is_end[1:] & (tokens[: -length - 1] == tokens[-length - 1])
        num_ends = np.count_nonzero(longer)
        if num_ends == 0:
            break
        is_end, length = longer, length + 1
    ends = np.flatnonzero(is_end) + length - 1
    while num_ends and length < longest:
        ends_before = ends[ends >= length]
        longer_ends = ends_before[tokens[ends_before - length] == tokens[-length - 1]]
        if len(longer_ends) == 0:
            break
        ends, length = longer_ends, length + 1
    return length, int(ends[-1])
