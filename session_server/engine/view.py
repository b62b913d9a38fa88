"""`LiveView`: the planner's read-only view of live turns and the live cache; not a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from cache.session_cache import SessionAwareCache
from cache.types import SessionId, TurnId, pages_for
from cache.views import TurnLoan
from session_server.engine.scheduler_view import AdmissionQuote, BlockReason, Load
from session_server.engine.shortage import PoolPages, ReclaimableTotal, add_pages
from session_server.engine.turn import Turn
from session_server.engine.turn_queue import Supply, WaitingQueue


def supply_of(cache: SessionAwareCache) -> Supply:
    """Return what admission may take now. Costs what `ParkedQueue.count` does."""
    num_sessions, freed_pages = cache.parked.count()
    headroom = cache.headroom()
    pages = add_pages(headroom.pages, [tuple(freed_pages.values())])
    return Supply(pages, headroom.num_rows + num_sessions)


class LiveView(msgspec.Struct, frozen=True, gc=False):
    """Show the planner live turns and the live cache. Valid until one of them changes.

    Implements `SchedulerView`. `max_turn_pages`: that of `TurnLimits`.
    """

    cache: SessionAwareCache
    running_turns: Sequence[Turn]
    queue: WaitingQueue
    is_in_flight: bool
    max_turn_pages: PoolPages

    @property
    def running(self) -> Sequence[LiveRunning]:
        """Return running turns, oldest first."""
        return [
            LiveRunning(
                turn_id=turn.request.turn_id,
                tenant=turn.request.tenant,
                num_uncomputed=turn.num_uncomputed,
                num_drafts=turn.num_drafts,
                num_spare=turn.current_admission.num_spare,
                loan=turn.current_admission.loan,
                view=self,
            )
            for turn in self.running_turns
        ]

    @property
    def waiting(self) -> Iterable[LiveWaiting]:
        """Return waiting turns, in order of admission."""
        return (LiveWaiting(self, turn) for turn in self.queue)

    @property
    def is_shared(self) -> bool:
        """Return whether there are sessions of several tenants."""
        return self.cache.num_tenants > 1

    def served(self, tenant: str) -> int:
        """Return the tokens a tenant counts as served; of several the least comes first."""
        return self.queue.served(tenant)

    def lag(self, tenant: str) -> int:
        """Return how many tokens a tenant is behind who was served most."""
        return self.queue.lag(tenant)

    @property
    def load(self) -> Load:
        """Return what the plan before found."""
        return self.queue.load

    @property
    def known_denial(self) -> tuple[TurnId, BlockReason] | None:
        """Return the denial of an earlier plan if it still holds. Costs what `supply` does."""
        if not self.queue.has_denial:
            return None
        return self.queue.known_denial(len(self.running_turns), self.supply)

    @property
    def supply(self) -> Supply:
        """Return what admission may take now. Costs what `ParkedQueue.count` does."""
        return supply_of(self.cache)

    @property
    def idle(self) -> Iterator[LiveReclaimable]:
        """Yield reclaimable sessions, least recently used first."""
        for session in self.cache.parked:
            yield LiveReclaimable(session.session_id, tuple(session.freed_pages.values()))

    @property
    def idle_total(self) -> ReclaimableTotal:
        """Return what all reclaimable sessions would free: `ParkedQueue.count`."""
        num_sessions, freed_pages = self.cache.parked.count()
        return ReclaimableTotal(num_sessions, tuple(freed_pages.values()))

    @property
    def headroom_pages(self) -> PoolPages:
        """Return the free and evictable pages of each pool."""
        return self.cache.headroom().pages

    @property
    def num_free_rows(self) -> int:
        """Return the number of free rows."""
        return self.cache.headroom().num_rows


class LiveReclaimable(msgspec.Struct, gc=False):
    """Implement `ReclaimableSession` for a parked session."""

    session_id: SessionId
    freed_pages: PoolPages


class LiveRunning(msgspec.Struct, gc=False):
    """Implement `RunningTurn`. Its numbers are read once, since a plan asks several times."""

    turn_id: TurnId
    tenant: str
    num_uncomputed: int
    num_drafts: int
    num_spare: int
    loan: TurnLoan
    view: LiveView

    @property
    def held_pages(self) -> PoolPages:
        """Return the pages that retracting it makes free or evictable; a lower bound."""
        return tuple(self.loan.retractable_pages().values())

    @property
    def promised_pages(self) -> PoolPages:
        """Return the pages it still takes until nothing is uncomputed."""
        cache, missing = self.view.cache, max(0, self.num_uncomputed - self.num_spare)
        num_pages = pages_for(missing, cache.spec.page_size)
        held_of = [self.loan.num_private(pool) for pool in cache.paged_pools]
        room = zip(self.view.max_turn_pages, held_of, strict=True)
        return tuple(min(num_pages, max(0, most - held)) for most, held in room)


class LiveWaiting(msgspec.Struct, gc=False):
    """Implement `WaitingTurn` for a turn in the waiting queue."""

    view: LiveView
    turn: Turn

    @property
    def turn_id(self) -> TurnId:
        """Return the id of the turn."""
        return self.turn.turn_id

    @property
    def session_id(self) -> SessionId:
        """Return the id of its session."""
        return self.turn.request.session_id

    @property
    def tenant(self) -> str:
        """Return whose turn it is."""
        return self.turn.request.tenant

    @property
    def times_bypassed(self) -> int:
        """Return how many turns behind it were admitted while it waited for pages."""
        return self.turn.clock.times_bypassed

    @property
    def reserved_pages(self) -> PoolPages:
        """Return the pages that other tenants lack of their minimums. O(pools)."""
        return self.view.cache.shares(self.tenant).reserved_pages

    def quote(self) -> AdmissionQuote:
        """Return what its admission costs now."""
        return self.view.queue.quotes.of(self.turn)
