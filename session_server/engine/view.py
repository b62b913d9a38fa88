"""The planner's window on live turns and the live cache: read-only and not a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from cache.session_cache import SessionAwareCache
from cache.types import SessionId, SlotState, TurnId, pages_for
from cache.views import SlotView
from session_server.engine.plan import AdmissionQuote
from session_server.engine.shortage import IdleTotal, PoolPages, total
from session_server.engine.turn import Turn


class LiveView(msgspec.Struct, frozen=True, gc=False):
    """A `SchedulerView`; valid until the cache or a turn changes. `most_pages`: of `TurnRoom`."""

    cache: SessionAwareCache
    running_turns: Sequence[Turn]
    waiting_turns: Sequence[Turn]
    is_in_flight: bool
    most_pages: PoolPages

    @property
    def running(self) -> Sequence[LiveRunning]:
        """See `SchedulerView`."""
        return [
            LiveRunning(
                turn_id=turn.request.turn_id,
                session_id=turn.request.session_id,
                num_uncomputed=turn.num_uncomputed,
                num_drafts=turn.num_drafts,
                num_spare=self.cache.capacity_len(turn.turn_id) - turn.borrowed.launched_len,
                view=self,
            )
            for turn in self.running_turns
        ]

    @property
    def waiting(self) -> Iterable[LiveWaiting]:
        """See `SchedulerView`."""
        return (LiveWaiting(self, turn) for turn in self.waiting_turns)

    @property
    def idle(self) -> Iterator[LiveIdle]:
        """See `SchedulerView`."""
        for session in self.cache.idle:
            yield LiveIdle(session.session_id, tuple(session.freed_pages.values()))

    @property
    def idle_total(self) -> IdleTotal:
        """See `SchedulerView`. O(pools)."""
        num_sessions, freed_pages = self.cache.idle.count()
        return IdleTotal(num_sessions, tuple(freed_pages.values()))

    @property
    def headroom_pages(self) -> PoolPages:
        """See `SchedulerView`."""
        ledgers = self.cache.stores.paged.values()
        return tuple([ledger.num_free + ledger.num_evictable for ledger in ledgers])

    @property
    def num_free_rows(self) -> int:
        """See `SchedulerView`."""
        return self.cache.stores.rows.num_free


class LiveIdle(msgspec.Struct, gc=False):
    """An `IdleSession`."""

    session_id: SessionId
    freed_pages: PoolPages


class LiveRunning(msgspec.Struct, gc=False):
    """A `RunningTurn`. Its numbers are taken once, since a plan asks for them several times."""

    turn_id: TurnId
    session_id: SessionId
    num_uncomputed: int
    num_drafts: int
    num_spare: int
    view: LiveView

    @property
    def held_pages(self) -> PoolPages:
        """See `RunningTurn`."""
        return tuple(self.view.cache.retractable_pages(self.turn_id).values())

    @property
    def promised_pages(self) -> PoolPages:
        """See `RunningTurn`."""
        cache, missing = self.view.cache, max(0, self.num_uncomputed - self.num_spare)
        num_pages = pages_for(missing, cache.stores.page_size)
        private = cache.slot(self.session_id).private_pages
        held_of = [private[pool] for pool in cache.stores.paged]
        room = zip(self.view.most_pages, held_of, strict=True)
        return tuple(min(num_pages, max(0, most - held)) for most, held in room)


class LiveWaiting(msgspec.Struct, gc=False):
    """A `WaitingTurn`."""

    view: LiveView
    turn: Turn

    @property
    def turn_id(self) -> TurnId:
        """See `WaitingTurn`."""
        return self.turn.turn_id

    @property
    def session_id(self) -> SessionId:
        """See `WaitingTurn`."""
        return self.turn.request.session_id

    @property
    def num_overtakings(self) -> int:
        """See `WaitingTurn`."""
        return self.turn.clock.num_overtakings

    def quote(self) -> AdmissionQuote:
        """O(1) for a parked session; a cold one is matched against the tree."""
        cache = self.view.cache
        slot = cache.slot(self.session_id)
        if slot.state is SlotState.COLD:
            return self._quote_cold(slot)
        to_len = min(self.turn.request.base_len, self._reusable_len())
        return self._quote(cache.kept_len(self.session_id, to_len), None)

    def _quote_cold(self, slot: SlotView) -> AdmissionQuote:
        cache = self.view.cache
        history = cache.tokens(self.session_id, 0, self.turn.request.base_len)
        tokens = np.concatenate((history, self.turn.uncommitted_tokens()))
        match = cache.peek(tokens[: self._reusable_len() + 1], slot.namespace)
        evictable = [match.evictable_pages[pool] for pool in cache.stores.paged]
        return self._quote(match.matched_len, evictable)

    def _reusable_len(self) -> int:
        """A forward needs a query, and a prompt's logprobs need its positions computed."""
        max_reuse_len = max_reuse(self.turn)
        last = self.turn.known_len - 1
        return last if max_reuse_len is None else min(last, max_reuse_len)

    def _quote(self, reuse_len: int, match_pages: Sequence[int] | None) -> AdmissionQuote:
        """`match_pages`: evictable ones that it locks, per pool; None for a parked session."""
        turn, page_size = self.turn, self.view.cache.stores.page_size
        # One page beyond the context, so that it is not retracted over its first tokens.
        soon_len = max(turn.known_len, min(turn.known_len + page_size, turn.last_len))
        num_pages = pages_for(soon_len, page_size) - pages_for(reuse_len, page_size)
        pages = tuple([min(num_pages, most) for most in self.view.most_pages])
        own = self.view.cache.idle.reclaimable(self.session_id)
        return AdmissionQuote(
            num_uncomputed=turn.known_len - reuse_len,
            context_pages=pages if match_pages is None else total(pages, [tuple(match_pages)]),
            needs_row=match_pages is not None,
            own_pages=None if own is None else tuple(own.freed_pages.values()),
        )


def max_reuse(turn: Turn) -> int | None:
    """Positions a turn may reuse; None for all. Prompt logprobs need logits, hence computing."""
    position = turn.next_score_position()
    if position is None or position >= turn.prompt_len - 1:
        return None
    return position
