"""`Handovers`: sessions that go on in another server, and whose KV is being written for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cache.tiers.segment import Segment
from session_server.engine.tiers.store import TierStore

HANDOVER_S: Final = 2.0
"""For how long a session that goes on elsewhere is kept back at most, until its KV is on disk."""


@dataclass(frozen=True, slots=True)
class _Handover:
    """`last`: the segment in which the copied history of a session ends."""

    last: Segment
    until_s: float
    then: Callable[[], object]


class Handovers:
    """Tell when what was copied of a session is on disk, or will not be."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._waiting: list[_Handover] = []

    def add(self, last: Segment | None, now_s: float, then: Callable[[], object]) -> None:
        """Call `then` once a segment and those before it are on disk, or it takes too long."""
        if last is None or not self._store.is_shared:
            then()
        else:
            self._waiting.append(_Handover(last, now_s + HANDOVER_S, then))

    @property
    def due_s(self) -> float | None:
        """Return when somebody has waited long enough; None if nobody waits."""
        return min((each.until_s for each in self._waiting), default=None)

    def advance(self, now_s: float) -> None:
        """Tell those whose time has come. O(1) while nobody waits."""
        if not self._waiting:
            return
        over = [each for each in self._waiting if now_s >= each.until_s or self._is_over(each)]
        self._waiting = [each for each in self._waiting if each not in over]
        for each in over:
            each.then()

    def _is_over(self, handover: _Handover) -> bool:
        """Of a path the beginning is written first, so the end says it of all."""
        last = handover.last
        is_kept = self._store.tree.get(last.number) is last
        return not is_kept or last.on_disk or last.is_refused
