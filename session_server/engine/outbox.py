"""`Outbox`: events for the server and page table changes for the next batch."""

from __future__ import annotations

from collections.abc import Iterable

from cache.types import TableWrite
from session_server.core.events import EngineEvent


class Outbox:
    """Collect events and page table changes in order.

    Table writes wait for the next launch, however many steps away it is. They are applied in launch
    order, which makes it safe to reuse a freed page.
    """

    def __init__(self) -> None:
        self._events: list[EngineEvent] = []
        self._table_writes: list[TableWrite] = []

    def emit(self, event: EngineEvent) -> None:
        """Add an event for the server."""
        self._events.append(event)

    def write(self, table_writes: Iterable[TableWrite]) -> None:
        """Add page table changes for the device."""
        self._table_writes.extend(table_writes)

    def take_events(self) -> list[EngineEvent]:
        """Return all events, oldest first, and clear them."""
        events, self._events = self._events, []
        return events

    def take_writes(self) -> tuple[TableWrite, ...]:
        """Return all page table changes, oldest first, and clear them."""
        table_writes, self._table_writes = tuple(self._table_writes), []
        return table_writes
