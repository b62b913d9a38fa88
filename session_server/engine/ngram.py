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
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    for length in range(2, MAX_MATCH + 1):
        ends_before = ends[ends >= length - 1]
        longer = ends_before[tokens[ends_before - length + 1] == tokens[-length]]
        if len(longer) == 0:
            if length <= MIN_MATCH:
                return _NOTHING
            break
        ends = longer
        if length == len(tokens) - 1:
            break
    return np.resize(tokens[ends[-1] + 1 :], num_drafts)
