"""The planner's window on live turns and the live cache: read-only and not a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from cache.session_cache import SessionAwareCache
from cache.types import SessionId, SlotState, TurnId
from cache.views import SlotView
from session_server.engine.plan import AdmissionQuote
from session_server.engine.turn import Turn


@dataclass(frozen=True, slots=True)
class LiveView:
    """A `SchedulerView`; valid until the cache or a turn changes."""

    cache: SessionAwareCache
    running_turns: Sequence[Turn]
    waiting_turns: Sequence[Turn]
    is_in_flight: bool

    @property
    def running(self) -> Sequence[LiveRunning]:
        """See `SchedulerView`."""
        return [
            LiveRunning(
                turn_id=turn.turn_id,
                num_uncomputed=turn.num_uncomputed,
                num_drafts=turn.num_drafts,
                num_spare=self.cache.capacity_len(turn.turn_id) - turn.borrowed.launched_len,
                cache=self.cache,
            )
            for turn in self.running_turns
        ]

    @property
    def waiting(self) -> Iterable[LiveWaiting]:
        """See `SchedulerView`."""
        return (LiveWaiting(self.cache, turn) for turn in self.waiting_turns)

    @property
    def idle(self) -> Iterator[LiveIdle]:
        """See `SchedulerView`."""
        for session in self.cache.idle_sessions():
            yield LiveIdle(session.session_id, min(session.freed_pages.values()))

    @property
    def num_headroom_pages(self) -> int:
        """See `SchedulerView`."""
        ledgers = self.cache.stores.ledgers.values()
        return min(ledger.num_free + ledger.num_evictable for ledger in ledgers)

    @property
    def num_free_rows(self) -> int:
        """See `SchedulerView`."""
        return self.cache.stores.rows.num_free


class LiveIdle(msgspec.Struct, gc=False):
    """An `IdleSession`."""

    session_id: SessionId
    num_pages: int


class LiveRunning(msgspec.Struct, gc=False):
    """A `RunningTurn`. Its numbers are taken once, since a plan asks for them several times."""

    turn_id: TurnId
    num_uncomputed: int
    num_drafts: int
    num_spare: int
    cache: SessionAwareCache

    @property
    def num_held_pages(self) -> int:
        """See `RunningTurn`."""
        return min(self.cache.retractable_pages(self.turn_id).values())


class LiveWaiting(msgspec.Struct, gc=False):
    """A `WaitingTurn`."""

    cache: SessionAwareCache
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
        slot = self.cache.slot(self.session_id)
        if slot.state is SlotState.COLD:
            return self._quote_cold(slot)
        to_len = min(self.turn.request.base_len, self._reusable_len())
        reuse_len = self.cache.kept_len(self.session_id, to_len)
        num_spare = -reuse_len % self.cache.stores.page_size
        return self._quote(reuse_len, num_spare, num_match_pages=0, needs_row=False)

    def _quote_cold(self, slot: SlotView) -> AdmissionQuote:
        history = self.cache.tokens(self.session_id, 0, self.turn.request.base_len)
        tokens = np.concatenate((history, self.turn.uncommitted_tokens()))
        match = self.cache.peek(tokens[: self._reusable_len() + 1], slot.namespace)
        evictable = max(match.evictable_pages.values())
        return self._quote(match.matched_len, 0, num_match_pages=evictable, needs_row=True)

    def _reusable_len(self) -> int:
        """A forward needs a query, and a prompt's logprobs need its positions computed."""
        max_reuse_len = max_reuse(self.turn)
        last = self.turn.known_len - 1
        return last if max_reuse_len is None else min(last, max_reuse_len)

    def _quote(
        self, reuse_len: int, num_spare: int, *, num_match_pages: int, needs_row: bool
    ) -> AdmissionQuote:
        turn = self.turn
        # One page beyond the context, so that it is not retracted over its first tokens.
        soon_len = min(turn.known_len + self.cache.stores.page_size, turn.last_len)
        return AdmissionQuote(
            num_uncomputed=turn.known_len - reuse_len,
            num_context=max(turn.known_len, soon_len) - reuse_len,
            num_spare=num_spare,
            num_match_pages=num_match_pages,
            needs_row=needs_row,
        )


def max_reuse(turn: Turn) -> int | None:
    """Positions a turn may reuse; None for all. Prompt logprobs need logits, hence computing."""
    position = turn.next_score_position()
    if position is None or position >= turn.prompt_len - 1:
        return None
    return position
