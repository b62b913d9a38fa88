"""What one turn needs room for in each pool, and so how long it may become."""

from __future__ import annotations

from dataclasses import dataclass

from cache.session_cache import SessionAwareCache
from session_server.engine.settings import EngineSettings, num_ahead
from session_server.engine.shortage import PoolPages


@dataclass(frozen=True, slots=True)
class TurnRoom:
    """`most_pages`: what a turn adds at a time, at most, to the pages of its session.
    `max_turn_len`: the longest context it may reach, with the pools to itself.
    """

    most_pages: PoolPages
    max_turn_len: int

    @classmethod
    def of(cls, cache: SessionAwareCache, settings: EngineSettings) -> TurnRoom:
        """What the pools of a cache and the limits of an engine give.

        Pinned sessions may keep their quota. Where layers forget, a pool that holds what a turn
        reads at a time, along with the window that it began at, holds a turn of any length.
        """
        row_pages, max_len = cache.stores.rows.row_pages, cache.max_context_len
        ahead = num_ahead(
            chunk_tokens=settings.chunk_tokens,
            num_in_flight=settings.num_in_flight,
            num_drafts=settings.speculation.num_drafts,
        )
        most_pages = []
        for component in cache.stores.components:
            if component.pool not in cache.stores.paged:
                continue  # a row comes with its states
            most = component.running_pages(row_pages, ahead)
            usable = cache.stores.ledgers[component.pool].num_pages - 1
            usable -= cache.pinned_quota()[component.pool]
            if not component.forgets or component.parked_pages(row_pages) + most > usable:
                max_len = min(max_len, usable * cache.stores.page_size)
            most_pages.append(most)
        return cls(tuple(most_pages), max_len)
