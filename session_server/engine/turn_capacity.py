"""`TurnCapacity`: how many pages one turn may need in each pool, and how long it may become."""

from __future__ import annotations

from dataclasses import dataclass

from cache.session_cache import SessionAwareCache
from session_server.engine.config import EngineConfig, num_ahead
from session_server.engine.shortage import PoolPages


@dataclass(frozen=True, slots=True)
class TurnCapacity:
    """Hold what the pools allow one turn.

    `max_new_pages`: the most pages that a turn adds at a time to those of its session, per pool.
    `max_turn_len`: tokens of the longest context that a turn reaches if it has the pools to itself.
    """

    max_new_pages: PoolPages
    max_turn_len: int

    @classmethod
    def of(cls, cache: SessionAwareCache, config: EngineConfig) -> TurnCapacity:
        """Return what the pools of a cache allow under the limits of an engine."""
        limits = cache.turn_limits(
            num_ahead(
                chunk_tokens=config.chunk_tokens,
                num_in_flight=config.num_in_flight,
                num_drafts=config.speculation.num_drafts,
            )
        )
        return cls(limits.most_pages, limits.max_len)
