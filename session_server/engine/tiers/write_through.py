"""`WriteThrough`: write what a session has published to disk because somebody waits for it.

Otherwise KV is written when host memory is nearly full, or at the engine's end. Here another engine
reads the files next. What they hold is dropped from host memory: it was copied there only to be
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from cache.session_cache import SessionAwareCache
from cache.tiers.segment import Segment
from cache.types import SessionId
from session_server.engine.tiers.spilling import Spilling
from session_server.engine.tiers.store import TierStore

MAX_WRITES: Final = 64
"""Sessions whose KV somebody waits for; of another one nothing is written."""


class WrittenFiles(NamedTuple):
    """Name the files, by id and bytes, that hold the first `num_tokens` of a session."""

    num_tokens: int = 0
    files: tuple[tuple[bytes, int], ...] = ()


ThenWritten = Callable[[WrittenFiles], object]


@dataclass(slots=True)
class _Wanted:
    """Say what is to be written, once it is known: `segments` is None while it is copied."""

    then: ThenWritten
    segments: Sequence[Segment] | None = None


class WriteThrough:
    """Write sessions, all that are asked for at the same time."""

    def __init__(self, cache: SessionAwareCache, store: TierStore, spilling: Spilling) -> None:
        self._cache, self._store, self._spilling = cache, store, spilling
        self._wanted: dict[SessionId, _Wanted] = {}

    def begin(self, session_id: SessionId, then: ThenWritten, *, cut: int) -> None:
        """Write a session at rest, and call `then` once with what is on disk. `cut`: see
        `WriteKV`."""
        is_full = len(self._wanted) >= MAX_WRITES or session_id in self._wanted
        if is_full or session_id not in self._cache or not self._store.has_disk:
            then(WrittenFiles())
            return
        self._spilling.cuts[session_id] = cut
        self._wanted[session_id] = _Wanted(then)

    def forget(self, session_id: SessionId) -> None:
        """Write no more of a session, which has another turn or is about to be closed."""
        wanted = self._wanted.pop(session_id, None)
        self._spilling.cuts.pop(session_id, None)
        if wanted is not None:
            wanted.then(WrittenFiles())

    def clear(self) -> None:
        """Write nothing of what was wanted: it may be wrong."""
        for session_id in list(self._wanted):
            self.forget(session_id)

    def advance(self) -> None:
        """Order what is due, and tell of what is over. O(segments of those that are wanted)."""
        for session_id, wanted in list(self._wanted.items()):
            if wanted.segments is None and self._is_copied(session_id):
                wanted.segments = self._segments_of(session_id)
            if wanted.segments is None:
                continue
            # Again in each step: one that was put off waits like any other.
            self._store.writes.hurry(wanted.segments)
            if self._is_over(wanted.segments):
                del self._wanted[session_id]
                self._spilling.cuts.pop(session_id, None)
                wanted.then(self._leave_on_disk(wanted.segments))

    def _is_copied(self, session_id: SessionId) -> bool:
        """Return whether all of a session is in host memory or on disk that will be."""
        return self._store.is_listed and not self._spilling.copies(session_id)

    def _segments_of(self, session_id: SessionId) -> Sequence[Segment]:
        slot = self._cache.slot(session_id)
        tokens = self._cache.tokens(session_id, 0, slot.protected_len)
        return [part.segment for part in self._store.find(slot.namespace, tokens).parts]

    def _is_over(self, segments: Sequence[Segment]) -> bool:
        """Return whether nothing of these is written any more."""
        writes = self._store.writes
        if writes.is_over or self._store.orders.disk_watch.is_silent:
            return True
        return not any(each in writes or each.is_writing for each in segments)

    def _leave_on_disk(self, segments: Sequence[Segment]) -> WrittenFiles:
        """Drop from host memory what is on disk, and return that, from the beginning on."""
        store, end, files = self._store, 0, list[tuple[bytes, int]]()
        for segment in segments:
            if not segment.on_disk or store.tree.get(segment.number) is not segment:
                break
            end = segment.content.end
            files.append((segment.content.file_id, segment.content.num_bytes))
            if segment.in_host:
                store.leave_host(segment)
        return WrittenFiles(end, tuple(files))
