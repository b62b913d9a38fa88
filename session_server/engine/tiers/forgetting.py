"""`Forgetting`: drop what sessions that were deleted or cut have left outside of the pools."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from cache.tiers.segment import Segment
from cache.types import Namespace, Tokens
from session_server.engine.tiers.store import TierStore

_TOKENS_PER_STEP: Final = 1 << 16
"""Tokens of histories that one step looks for: some of them are hashed."""

MAX_FORGOTTEN_TOKENS: Final = 1 << 24
"""Tokens of histories that wait. It takes as many only while the disk is not known yet."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Name what nobody keeps: a history behind its first tokens, as far as nobody else has it.

    `last`: a segment in which a session that is gone has ended, be it in that history or not.
    """

    namespace: Namespace
    tokens: Tokens
    num_kept: int = 0
    last: Segment | None = None


class Forgetting:
    """Drop what was left, some of it in each step, in order."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._waiting: deque[Forgotten] = deque()
        self._num_tokens = 0

    @property
    def has_more(self) -> bool:
        """Return whether another step may drop something."""
        return bool(self._waiting) and self._store.is_listed

    def add(self, forgotten: Forgotten) -> None:
        """Drop something, now or soon."""
        if not self._store.is_empty:
            self._waiting.append(forgotten)
            self._num_tokens += len(forgotten.tokens)

    def clear(self) -> None:
        """Wait for nothing: everything was dropped."""
        self._waiting.clear()
        self._num_tokens = 0

    def advance(self) -> None:
        """Drop what is due. O(1) while nothing is."""
        num_done = 0
        while self._waiting:
            is_crowded = self._num_tokens > MAX_FORGOTTEN_TOKENS
            if not is_crowded and (num_done >= _TOKENS_PER_STEP or not self._store.is_listed):
                return
            forgotten = self._waiting.popleft()
            self._num_tokens -= len(forgotten.tokens)
            num_done += len(forgotten.tokens)
            self._drop(forgotten)

    def _drop(self, forgotten: Forgotten) -> None:
        """Of sessions that are not open only what follows is known to be theirs."""
        store, namespace, num_kept = self._store, forgotten.namespace, forgotten.num_kept
        num_kept -= num_kept % store.tree.page_size
        store.drop_unshared(forgotten.last)
        path = store.find(namespace, forgotten.tokens)
        store.drop_unread(namespace, path, forgotten.tokens, num_kept)
        store.drop_unshared(path.parts[-1].segment if path.parts else None, num_kept)
