"""`RoomWatch`: ask the disk for its room now and then, whoever takes it."""

from __future__ import annotations

from typing import Final

from session_server.core.tier_orders import MeasureRoom, TierResult
from session_server.engine.tiers.store import TierStore

ROOM_INTERVAL_S: Final = 2.0
"""Seconds between two questions, within which the log may have to wait for room."""


class RoomWatch:
    """Have files take what the disk has room for. What is written says it too, so nothing is asked
    meanwhile."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._due_s = 0.0
        self._is_asked = False

    @property
    def due_s(self) -> float | None:
        """Return when to ask; None while an answer is to come that says it, or what files take is
        not known."""
        store = self._store
        is_known = store.has_disk and store.is_listed
        is_coming = self._is_asked or store.is_writing or store.orders.disk_watch.is_silent
        return self._due_s if is_known and not is_coming else None

    def ask(self, now_s: float) -> None:
        """Ask if it is time to."""
        due_s, held_bytes = self.due_s, self._store.disk.num_bytes
        if due_s is None or now_s < due_s:
            return
        self._is_asked, self._due_s = True, now_s + ROOM_INTERVAL_S

        def take(result: TierResult) -> None:
            self._is_asked = False
            self._store.disk.note_room(result, held_bytes=held_bytes, now_s=now_s)

        self._store.orders.add(MeasureRoom, take)
