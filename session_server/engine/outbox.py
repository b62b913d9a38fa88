"""What a step has produced so far: events for the server, page table deltas for the next batch."""

from __future__ import annotations

from collections.abc import Iterable

from cache.types import TableWrite
from session_server.core.events import EngineEvent


class Outbox:
    """Collects in order; whoever takes, empties.

    Table deltas wait for the next launch, however many steps away it is: they are applied in
    launch order, which is what makes reusing a freed page safe.
    """

    def __init__(self) -> None:
        self._events: list[EngineEvent] = []
        self._table_writes: list[TableWrite] = []

    def emit(self, event: EngineEvent) -> None:
        """Tell the server."""
        self._events.append(event)

    def write(self, table_writes: Iterable[TableWrite]) -> None:
        """Tell the device."""
        self._table_writes.extend(table_writes)

    def take_events(self) -> list[EngineEvent]:
        """All events, oldest first."""
        events, self._events = self._events, []
        return events

    def take_writes(self) -> tuple[TableWrite, ...]:
        """All deltas, oldest first."""
        table_writes, self._table_writes = tuple(self._table_writes), []
        return table_writes
