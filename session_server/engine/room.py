"""What one turn needs room for in each pool, and so how long it may become."""

from __future__ import annotations

from dataclasses import dataclass

from cache.session_cache import SessionAwareCache
from session_server.engine.config import EngineConfig, num_ahead
from session_server.engine.shortage import PoolPages


@dataclass(frozen=True, slots=True)
class TurnRoom:
    """`most_pages`: what a turn adds at a time, at most, to the pages of its session.
    `max_turn_len`: the longest context it may reach, with the pools to itself.
    """

    most_pages: PoolPages
    max_turn_len: int

    @classmethod
    def of(cls, cache: SessionAwareCache, config: EngineConfig) -> TurnRoom:
        """Return what the pools of a cache and the limits of an engine give."""
        limits = cache.turn_limits(
            num_ahead(
                chunk_tokens=config.chunk_tokens,
                num_in_flight=config.num_in_flight,
                num_drafts=config.speculation.num_drafts,
            )
        )
        return cls(limits.most_pages, limits.max_len)
