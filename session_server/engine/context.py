"""`EngineContext`: what all parts of one engine share."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.session_cache import SessionAwareCache
from session_server.engine.config import EngineConfig
from session_server.engine.memory import MemoryWatch
from session_server.engine.outbox import Outbox
from session_server.engine.stats import Counters


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Hold the limits, the cache, its checks, and where events and totals go."""

    config: EngineConfig
    cache: SessionAwareCache
    watch: MemoryWatch
    outbox: Outbox = field(default_factory=Outbox)
    counters: Counters = field(default_factory=Counters)
