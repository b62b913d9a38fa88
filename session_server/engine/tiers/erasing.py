"""`Erasing`: have what was dropped be gone from disk for good, one batch after the other.

Of a directory that is shared it names the histories: their files are found there, whoever has
written them. That takes a look at all names, so many histories share one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from session_server.core.tier_orders import DroppedPath, EraseFiles, TierResult
from session_server.engine.tiers.order_book import Continue
from session_server.engine.tiers.store import TierStore

BATCH_TOKENS: Final = 1 << 18
"""Tokens of histories whose files are looked for at the same time, if it is more than one."""

MAX_LEFT_TOKENS: Final = 1 << 22
"""Tokens of histories that wait for that. Files of a further one are left, and age out."""

_ITEM_TOKENS: Final = 128
"""What one that waits counts at least: it takes some memory too."""

ThenGone = Callable[[bool], object]
"""Called once with whether nothing is left, in host memory or on disk."""


class _Dropped(NamedTuple):
    paths: tuple[DroppedPath, ...]
    then: ThenGone | None

    @property
    def size(self) -> int:
        """Return the tokens that it counts."""
        return _ITEM_TOKENS + sum(len(path.tokens) for path in self.paths)


class Erasing:
    """Erase what was dropped, and say so. One order at a time: a disk that is slow, or hangs, is
    given no more."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._waiting: deque[_Dropped] = deque()
        self._num_tokens = 0
        self._is_under_way = self._is_waited_for = False

    @property
    def has_paths(self) -> bool:
        """Return whether files of a history are to be removed that may be of others."""
        return self._store.is_shared and (self._is_under_way or bool(self._waiting))

    def add(self, paths: tuple[DroppedPath, ...], then: ThenGone | None) -> None:
        """Have the files of histories removed, and call `then` once what was dropped before is
        gone for good, or some may be left."""
        dropped = _Dropped(paths, then)
        if self._waiting and self._num_tokens + dropped.size > MAX_LEFT_TOKENS:
            dropped = _Dropped((), None)
        if then is not None and not (dropped.then and self._is_known):
            then(False)
            dropped = _Dropped(dropped.paths, None)
        if dropped.paths or dropped.then is not None:
            self._waiting.append(dropped)
            self._num_tokens += dropped.size
            self._is_waited_for |= dropped.then is not None

    def advance(self) -> None:
        """Order the next batch if none is under way."""
        if not (self._is_known and self._store.has_disk):
            self._tell_all(is_gone=self._is_known)
            return
        paths, thens, num_tokens = list[DroppedPath](), list[ThenGone](), 0
        while self._waiting and not self._is_under_way:
            num_tokens += self._waiting[0].size
            if (paths or thens) and num_tokens > BATCH_TOKENS:
                break
            dropped = self._waiting.popleft()
            self._num_tokens -= dropped.size
            paths += dropped.paths
            thens += filter(None, [dropped.then])
        if paths or thens:
            self._order(tuple(paths), thens)

    @property
    def _is_known(self) -> bool:
        return not (self._store.has_unlisted or self._store.orders.disk_watch.is_silent)

    def _tell_all(self, *, is_gone: bool) -> None:
        """Let nobody wait. The files of histories go once the disk answers."""
        if not self._is_waited_for:
            return
        self._is_waited_for = False
        waiting = self._waiting
        self._waiting, self._num_tokens = deque(), 0
        for paths, then in waiting:
            self.add(paths, None)
            if then is not None:
                then(is_gone)

    def _order(self, paths: tuple[DroppedPath, ...], thens: list[ThenGone]) -> None:
        self._is_under_way = True

        def tell(*, is_gone: bool) -> None:
            told = thens.copy()
            thens.clear()
            for then in told:
                then(is_gone)

        def take(result: TierResult) -> None:
            if result.has_more:
                self._order((), thens)
                return
            self._is_under_way = False
            tell(is_gone=result.refusal is None)

        def give_up() -> Continue:
            tell(is_gone=False)
            return take

        self._store.orders.add(lambda number: EraseFiles(number, paths), take, give_up=give_up)
