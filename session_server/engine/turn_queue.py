"""`WaitingQueue`: turns that wait for admission, and what spares pricing them again.

Pricing a cold turn matches its whole history, and a plan may price a queue of them. `Quotes` keeps
the price of each turn, and `_Denial` keeps that no turn could be admitted, until something they
depend on changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cache.radix_node import MatchResult
from cache.session_cache import SessionAwareCache
from cache.types import SlotState, TurnId, pages_for
from session_server.engine.scheduler_view import AdmissionQuote, BlockReason, Load
from session_server.engine.shortage import PoolPages, add_pages
from session_server.engine.tenant_lines import TenantLines
from session_server.engine.turn import Turn


class _Known(NamedTuple):
    """Keep a quote, and what it was made of. `match` is None for a resident session."""

    version: int
    match: MatchResult | None
    quote: AdmissionQuote


class Quotes:
    """Price waiting turns, and keep the prices while they hold."""

    def __init__(self, cache: SessionAwareCache, max_turn_pages: PoolPages) -> None:
        """Start without prices. `max_turn_pages`: that of `TurnLimits`."""
        self._cache = cache
        self._max_turn_pages = max_turn_pages
        self._known: dict[TurnId, _Known] = {}

    def of(self, turn: Turn) -> AdmissionQuote:
        """Return what admitting a turn costs now.

        O(1) while nothing has changed in the tree, O(edges of its match) while its match still
        holds. Otherwise the history of a cold session is matched.
        """
        version, known = self._cache.match_version, self._known.get(turn.turn_id)
        if known is None or known.version != version:
            if known is not None and known.match and self._cache.is_current(known.match):
                known = known._replace(version=version)
            else:
                known = self._price(turn)
            self._known[turn.turn_id] = known
        return known.quote

    def drop(self, turn: Turn) -> None:
        """Drop the quote of a turn that waits no longer."""
        self._known.pop(turn.turn_id, None)

    def _price(self, turn: Turn) -> _Known:
        cache, session_id = self._cache, turn.request.session_id
        slot = cache.slot(session_id)
        most = reusable_len(turn)
        if slot.state is SlotState.COLD:
            history = cache.tokens(session_id, 0, turn.request.base_len)
            tokens = np.concatenate((history, turn.uncommitted_tokens()))
            match = cache.peek(tokens[: most + 1], slot.namespace)
            quote = self._quote(turn, match.matched_len, match, match.matched_len)
            return _Known(cache.match_version, match, quote)
        new_tokens = turn.uncommitted_tokens()
        base_len = turn.request.base_len
        kept_len = cache.kept_len(session_id, base_len, new_tokens, most)
        # Pages of a tail are headroom until the turn has them.
        held_len = min(kept_len, slot.committed_len - slot.tail_len)
        return _Known(cache.match_version, None, self._quote(turn, kept_len, None, held_len))

    def _quote(
        self, turn: Turn, reuse_len: int, match: MatchResult | None, held_len: int
    ) -> AdmissionQuote:
        """Price a turn that reuses `reuse_len` positions, for `held_len` of which it has pages."""
        cache, page_size = self._cache, self._cache.spec.page_size
        # One page beyond the context, so that its first tokens do not cause a retraction.
        soon_len = max(turn.known_len, min(turn.known_len + page_size, turn.max_computed_len))
        num_pages = pages_for(soon_len, page_size) - pages_for(held_len, page_size)
        tenant = turn.request.tenant
        pages = tuple([min(num_pages, most) for most in self._max_turn_pages])
        if match is not None:
            # Pages that its match locks cannot be evicted for other turns.
            pages = add_pages(pages, [cache.shares(tenant).lock_cost(match.evictable_pages)])
        own = cache.parked.reclaimable(turn.request.session_id)
        return AdmissionQuote(
            num_uncomputed=turn.known_len - reuse_len,
            context_pages=pages,
            needs_row=match is not None,
            own_pages=None if own is None else tuple(own.freed_pages.values()),
        )


def reusable_len(turn: Turn) -> int:
    """Return the positions it may reuse at most: one token at least must be computed."""
    max_reuse_len = max_reuse(turn)
    last = turn.known_len - 1
    return last if max_reuse_len is None else min(last, max_reuse_len)


def max_reuse(turn: Turn) -> int | None:
    """Return how many positions a turn may reuse; None for all.

    Prompt logprobs need logits, so their positions must be computed.
    """
    position = turn.next_prompt_logprob_position()
    if position is None or position >= turn.prompt_len - 1:
        return None
    return position


class Supply(NamedTuple):
    """Count what admission may take: free, evictable and reclaimable pages; rows likewise."""

    pages: PoolPages
    num_rows: int

    def is_within(self, other: Supply) -> bool:
        """Return whether it is no more than another supply, in every pool."""
        pairs = zip(self.pages, other.pages, strict=True)
        return self.num_rows <= other.num_rows and all(mine <= its for mine, its in pairs)


class _Denial(NamedTuple):
    """Remember that a plan could admit no turn of the queue, and what that depended on.

    Running turns count by their number and by what they leave. `supply` is the most that was there
    since: less of it admits no turn either.
    """

    blocked: tuple[TurnId, BlockReason]
    versions: tuple[int, int]
    num_running: int
    supply: Supply


class WaitingQueue(TenantLines):
    """Hold turns that wait for admission; tenants come in rotation. `load`: of the last plan."""

    def __init__(self, cache: SessionAwareCache, max_turn_pages: PoolPages) -> None:
        super().__init__()
        self._cache = cache
        self._denial: _Denial | None = None
        self.quotes = Quotes(cache, max_turn_pages)
        self.load = Load()

    def remove(self, turn: Turn) -> None:
        """Remove a turn and its quote."""
        super().remove(turn)
        self.quotes.drop(turn)

    def note_denial(
        self, blocked: tuple[TurnId, BlockReason], num_running: int, supply: Supply
    ) -> None:
        """Record that no turn could be admitted; `blocked` is the first that waits, and why.

        Each of the `num_running` turns lacked at most one position.
        """
        self._denial = _Denial(blocked, self._versions, num_running, supply)

    def known_denial(self, num_running: int, supply: Supply) -> tuple[TurnId, BlockReason] | None:
        """Return who is blocked and why if a recorded denial still holds, else None."""
        denial = self._denial
        if denial is None or (denial.versions, denial.num_running) != (self._versions, num_running):
            return None
        return denial.blocked if supply.is_within(denial.supply) else None

    @property
    def has_denial(self) -> bool:
        """Return whether a denial is recorded, so that `known_denial` is worth a call."""
        return self._denial is not None and bool(self)

    @property
    def _versions(self) -> tuple[int, int]:
        return self.version, self._cache.match_version
