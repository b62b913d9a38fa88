"""`Handovers`: sessions that go on in another server, and whose KV is being written for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cache.tiers.segment import Segment
from session_server.engine.tiers.store import TierStore

HANDOVER_S: Final = 2.0
"""For how long a session that goes on elsewhere is kept back at most, until its KV is on disk."""


@dataclass(slots=True, eq=False)
class _Handover:
    """`last`: the segment in which the copied history of a session ends."""

    last: Segment
    until_s: float
    then: Callable[[], object]
    is_told: bool = False

    def tell(self) -> None:
        """Say that it need not wait any more."""
        self.is_told = True
        self.then()


class Handovers:
    """Tell when what was copied of a session is on disk, or will not be."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._in_order: deque[_Handover] = deque()
        """Those that wait, as they came; of those that were told, some too."""

        self._of_segment: dict[int, deque[_Handover]] = {}
        """Those that wait, by the number of their segment."""

    def add(self, last: Segment | None, now_s: float, then: Callable[[], object]) -> None:
        """Call `then` once a segment and those before it are on disk, or it takes too long."""
        if last is None or not self._store.is_shared or self._is_over(last):
            then()
            return
        handover = _Handover(last, now_s + HANDOVER_S, then)
        self._in_order.append(handover)
        self._of_segment.setdefault(last.number, deque()).append(handover)
        self._store.writes.watch(last)

    @property
    def due_s(self) -> float | None:
        """Return when somebody has waited long enough; None if nobody waits."""
        return self._in_order[0].until_s if self._in_order else None

    def advance(self, now_s: float) -> None:
        """Tell those whose time has come. O(1) for each that is told and for each segment that was
        written, whoever waits beside."""
        for number in self._store.writes.take_changed():
            last = self._of_segment[number][0].last
            if self._is_over(last):
                self._store.writes.unwatch(last)  # one that came since has asked again
                for each in self._of_segment.pop(number):
                    each.tell()
            else:
                self._store.writes.watch(last)
        while self._in_order and (self._in_order[0].is_told or now_s >= self._in_order[0].until_s):
            each = self._in_order.popleft()
            if not each.is_told:
                self._give_up(each)

    def _give_up(self, handover: _Handover) -> None:
        number = handover.last.number
        first = self._of_segment[number].popleft()
        assert first is handover, "those of a segment are in order too"
        if not self._of_segment[number]:
            del self._of_segment[number]
            self._store.writes.unwatch(handover.last)
        handover.tell()

    def _is_over(self, last: Segment) -> bool:
        """Of a path the beginning is written first, so the end says it of all."""
        is_kept = self._store.tree.get(last.number) is last
        return not is_kept or last.on_disk or last.is_refused
