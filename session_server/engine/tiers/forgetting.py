"""`Forgetting`: drop what sessions that were deleted or cut have left outside of the pools."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from cache.tiers.segment import Segment
from cache.types import Namespace, Tokens
from session_server.core.tier_orders import DroppedPath
from session_server.engine.tiers.erasing import Erasing, ThenGone
from session_server.engine.tiers.store import TierStore

_TOKENS_PER_STEP: Final = 1 << 16
"""Tokens of histories that one step looks for: some of them are hashed."""

_LEAST_TOKENS: Final = 128
"""What a history counts at least: to look for a short one takes as long, and it takes some memory
while it waits."""

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
    then: ThenGone | None = None

    @property
    def size(self) -> int:
        """Return the tokens that it counts."""
        return max(_LEAST_TOKENS, len(self.tokens))


class Forgetting:
    """Drop what was left, some of it in each step, in order."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._waiting: deque[Forgotten] = deque()
        self._num_tokens = 0
        self._erasing = Erasing(store)

    @property
    def has_more(self) -> bool:
        """Return whether another step may drop something."""
        return bool(self._waiting) and self._store.is_listed

    @property
    def is_erasing(self) -> bool:
        """Return whether files are being removed that others may have written, of a disk that
        answers."""
        return self._erasing.has_paths and not self._store.orders.disk_watch.is_silent

    def add(self, forgotten: Forgotten) -> None:
        """Drop something, now or soon."""
        if forgotten.then is not None or not self._store.is_empty:
            self._waiting.append(forgotten)
            self._num_tokens += forgotten.size

    def clear(self) -> None:
        """Wait for nothing: everything was dropped, but what others have in a shared directory."""
        if self._store.is_shared:
            self._erasing.add((), lambda _: None)  # what may be wrong goes at once
            return
        for each in self._waiting:
            self._erasing.add((), each.then)
        self._waiting.clear()
        self._num_tokens = 0

    def advance(self) -> None:
        """Drop what is due. O(1) while nothing is."""
        self._drop_some()
        # The file of a segment that was dropped while it was written is forgotten behind that, and
        # those that followed a dropped one a slice with each step.
        if not (self._has_orphan or self._store.pace.has_dropped):
            self._erasing.advance()

    def _drop_some(self) -> None:
        num_done = 0
        while self._waiting:
            is_crowded = self._num_tokens > MAX_FORGOTTEN_TOKENS
            if not is_crowded and (num_done >= _TOKENS_PER_STEP or not self._store.is_listed):
                return
            forgotten = self._waiting.popleft()
            self._num_tokens -= forgotten.size
            num_done += forgotten.size
            self._drop(forgotten)

    @property
    def _has_orphan(self) -> bool:
        """Return whether a file is being written of a segment that was dropped meanwhile, by a disk
        that answers."""
        segment = self._store.writes.under_way
        if segment is None or self._store.orders.disk_watch.is_silent:
            return False
        return self._store.tree.get(segment.number) is not segment

    def _drop(self, forgotten: Forgotten) -> None:
        """Of sessions that are not open only what follows is known to be theirs."""
        store, namespace, num_kept = self._store, forgotten.namespace, forgotten.num_kept
        num_kept -= num_kept % store.tree.page_size
        ends = self._ends_of(forgotten, num_kept) if store.is_shared else []
        store.drop_unshared(forgotten.last)
        path = store.find(namespace, forgotten.tokens)
        store.drop_unread(namespace, path, forgotten.tokens, num_kept)
        store.drop_unshared(path.parts[-1].segment if path.parts else None, num_kept)
        then, paths = forgotten.then, list[DroppedPath]()
        for whose, tokens, kept_len in ends:
            held_len = store.find(whose, tokens).length  # what others here have of it
            paths.append(DroppedPath(whose, tokens, max(held_len, kept_len)))
        if then is not None and not store.is_listed:
            then(False)
            then = None
        self._erasing.add(tuple(paths), then)

    def _ends_of(self, forgotten: Forgotten, num_kept: int) -> list[tuple[Namespace, Tokens, int]]:
        """Return the histories whose files go, and the tokens of them that stay."""
        ends, tree = [(forgotten.namespace, forgotten.tokens, num_kept)], self._store.tree
        last = tree.living(forgotten.last)
        path = self._store.find(forgotten.namespace, forgotten.tokens)
        if last is not None and all(part.segment is not last for part in path.parts):
            ends.append((last.content.namespace, tree.tokens_up_to(last), 0))
        return ends
