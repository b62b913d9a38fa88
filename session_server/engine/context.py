"""`EngineContext`: what all parts of one engine share, its outbox and its totals among it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cache.session_cache import SessionAwareCache
from cache.types import RowId, TableWrite
from session_server.core.events import EngineEvent
from session_server.engine.config import EngineConfig
from session_server.engine.in_flight import Changes, InFlight
from session_server.engine.memory import MemoryWatch
from session_server.engine.tallies import Tallies
from session_server.engine.tiers.tiers import Tiers


@dataclass(slots=True)
class Counters:
    """Count what an engine did since its start.

    `host_s`: seconds outside forwards, measured by the loop that drives the engine. `overshoots`:
    rows computed for turns that had ended or been retracted by then. `shortfalls`: turns that
    waited another step because pages that the plan counted on were not there. `draft_tokens`:
    drafts verified; `accepted_tokens`: drafts accepted.
    """

    steps: int = 0
    forward_s: float = 0.0
    host_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    retractions: int = 0
    coolings: int = 0
    overshoots: int = 0
    shortfalls: int = 0


class Outbox:
    """Collect events, page table changes and ends of turns in order.

    Table writes wait for the next launch, however many steps away it is. They are applied in launch
    order, which makes it safe to reuse a freed page. Rows whose turn has ended wait for it too.
    """

    def __init__(self) -> None:
        self._events: list[EngineEvent] = []
        self._table_writes: list[TableWrite] = []
        self._ended: dict[RowId, None] = {}  # each once, however many of its turns end meanwhile

    def emit(self, event: EngineEvent) -> None:
        """Add an event for the server."""
        self._events.append(event)

    def write(self, table_writes: Iterable[TableWrite]) -> None:
        """Add page table changes for the device."""
        self._table_writes.extend(table_writes)

    def end(self, row: RowId) -> None:
        """Tell the runner that no turn of a row goes on: another one starts anew."""
        self._ended[row] = None

    def take_events(self) -> list[EngineEvent]:
        """Return all events, oldest first, and clear them."""
        events, self._events = self._events, []
        return events

    def take_changes(self) -> Changes:
        """Return what the next launch brings the runner, and clear it."""
        ended, self._ended = tuple(self._ended), {}
        table_writes, self._table_writes = tuple(self._table_writes), []
        return table_writes, ended

    def drop_writes(self) -> None:
        """Forget all page table changes."""
        self._table_writes = []


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Hold the limits, the cache, its checks, what is in flight, and where events and totals go."""

    config: EngineConfig
    cache: SessionAwareCache
    watch: MemoryWatch
    in_flight: InFlight
    tiers: Tiers
    outbox: Outbox = field(default_factory=Outbox)
    counters: Counters = field(default_factory=Counters)
    tallies: Tallies = field(default_factory=Tallies)
