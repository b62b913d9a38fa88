"""Turns of any length without a device: the verbs alone, for tests that count work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache.session_cache import SessionAwareCache
from cache.types import SessionId, TurnId


def run_turn(cache: SessionAwareCache, session_id: SessionId, new_tokens: Sequence[int]) -> None:
    """A turn that computes all its input and keeps it."""
    base_len = cache.slot(session_id).num_tokens
    turn_id = TurnId(f"{session_id} from {base_len}")
    loan = cache.begin_turn(session_id, turn_id, base_len=base_len, new_tokens=np.array(new_tokens))
    length, end = loan.cached_len, base_len + len(new_tokens)
    while length < end:
        length = min(length + 512, end)
        cache.grow(turn_id, length)
        cache.record(turn_id, length)
    cache.end_turn(turn_id, end)
