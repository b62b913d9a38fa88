"""`Budget`: the tokens, pages and rows that one plan may still give out.

A plan starts with the budget of the view. Each piece of the plan takes from it, and cooling an idle
session or retracting a running turn adds to it. Nothing here touches the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Final

from cache.types import SessionId, pages_for
from session_server.engine.scheduler_view import Limits, RunningTurn, SchedulerView
from session_server.engine.shortage import (
    PoolPages,
    ReclaimableSession,
    ReclaimableTotal,
    Shortage,
    add_pages,
    subtract_pages,
)

MAX_COOLED: Final = 64
"""Idle sessions that one plan cools, and one more for each running turn: about 10 ms."""


class ReclaimableSessions:
    """Track the sessions that a plan may still cool, and those that it cools.

    `cooled`: ids in the order of the plan. Sessions are read from the view only as far as needed.
    """

    def __init__(self, view: SchedulerView, num_pools: int) -> None:
        self._view = view
        self._rest: Iterator[ReclaimableSession] = view.idle
        self._gone_pages: PoolPages = (0,) * num_pools
        self._kept: set[SessionId] = set()
        self.cooled: list[SessionId] = []

    def remaining(self) -> ReclaimableTotal:
        """Return how many sessions are left to cool, and the pages they free."""
        return ReclaimableTotal(
            self._total.num_sessions - len(self.cooled) - len(self._kept),
            subtract_pages(self._total.freed_pages, self._gone_pages),
        )

    @cached_property
    def _total(self) -> ReclaimableTotal:
        """Return what all could give when the plan began, summed up once and only if it matters."""
        return self._view.idle_total

    def may_ask(self, shortage: Shortage) -> bool:
        """Return whether this plan may cool another session for a need, or the next plan has to."""
        return not shortage.cooled or len(self.cooled) + len(shortage.cooled) < MAX_COOLED

    def ask(self, shortage: Shortage, own: SessionId | None = None) -> ReclaimableSession | None:
        """Ask sessions, least recently used first, until it is met, none is left or `may_ask` ends.

        Args:
            shortage: records who was asked. Cool those with `Budget.cool`, `put_back` the others.
            own: session of the turn in need. It is not asked: cooling it would free pages that the
                turn then has to compute again.

        Returns:
            The session `own`, if it was reached.
        """
        own_session = None
        while shortage and self.may_ask(shortage):
            if (session := next(self._rest, None)) is None:
                break
            if session.session_id == own:
                own_session = session
            elif session.session_id not in self._kept:
                shortage.ask(session)
        return own_session

    def put_back(self, sessions: Sequence[ReclaimableSession]) -> None:
        """Let later turns of this plan ask these sessions again, before all others."""
        self._rest = itertools.chain(sessions, self._rest)

    def keep(self, session_id: SessionId, freed_pages: PoolPages) -> None:
        """Ask a session no more that would free so many pages: a turn of it is admitted, at the
        price of one that goes on from what the session holds."""
        self._kept.add(session_id)
        self._gone_pages = add_pages(self._gone_pages, [freed_pages])

    def add_cooled(self, sessions: Sequence[ReclaimableSession]) -> None:
        """Record sessions that the plan cools."""
        self._gone_pages = add_pages(self._gone_pages, (s.freed_pages for s in sessions))
        self.cooled += [session.session_id for session in sessions]


class Budget:
    """Track what a plan may still give out.

    Attributes:
        num_tokens: prefill and draft tokens. The single token of a decoding turn is not counted.
        pages: free and evictable pages, per pool.
        num_rows: free rows; below 0 while an admission is short of one.
        idle: sessions that can be cooled for more pages and rows.
    """

    def __init__(self, view: SchedulerView, limits: Limits, num_tokens: int) -> None:
        self._page_size = limits.page_size
        self.num_tokens = num_tokens
        self.pages = view.headroom_pages
        self.num_rows = view.num_free_rows
        self.idle = ReclaimableSessions(view, len(self.pages))

    def new_pages(self, num_tokens: int, num_spare: int) -> int:
        """Return the pages that `num_tokens` positions need beyond `num_spare` free ones."""
        return pages_for(max(0, num_tokens - num_spare), self._page_size)

    def has_pages(self, num_pages: int) -> bool:
        """Return whether every pool has `num_pages` left. A turn grows by as many in each pool."""
        return num_pages <= min(self.pages)

    def grow(self, num_pages: int) -> None:
        """Take `num_pages` of every pool."""
        if num_pages:
            self.take((num_pages,) * len(self.pages))

    def take(self, pages: PoolPages) -> None:
        """Take pages, per pool."""
        self.pages = subtract_pages(self.pages, pages)

    def cool(self, sessions: Sequence[ReclaimableSession]) -> None:
        """Add the pages and rows of sessions that the plan cools."""
        self.pages = add_pages(self.pages, (session.freed_pages for session in sessions))
        self.num_rows += len(sessions)
        self.idle.add_cooled(sessions)

    def retract(self, turns: Iterable[RunningTurn]) -> None:
        """Add the pages and rows of turns that the plan retracts."""
        for turn in turns:
            self.pages = add_pages(self.pages, [turn.held_pages])
            self.num_rows += 1
