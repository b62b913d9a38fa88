"""`TurnQueue`: turns in their order, and what keeps those that wait from being asked about again.

Pricing a cold turn matches its whole history, and a plan may price a line of them. Both answers are
kept until something they depend on changes: `Quotes` per turn, `Denial` for the line as a whole.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from cache.radix_node import MatchResult
from cache.session_cache import SessionAwareCache
from cache.types import SlotState, TurnId, pages_for
from session_server.engine.scheduler_view import AdmissionQuote, BlockReason
from session_server.engine.shortage import PoolPages, add_pages
from session_server.engine.turn import Turn


class TurnQueue(Sequence[Turn]):
    """Turns in `Turn.order`. `version` changes with every turn that comes or goes."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self.version = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)

    @overload
    def __getitem__(self, index: int) -> Turn: ...

    @overload
    def __getitem__(self, index: slice) -> list[Turn]: ...

    def __getitem__(self, index: int | slice) -> Turn | list[Turn]:
        return self._turns[index]

    def insert(self, turn: Turn) -> None:
        """Put a turn in its place. O(log turns)."""
        self.version += 1
        bisect.insort(self._turns, turn, key=lambda other: other.order)

    def remove(self, turn: Turn) -> None:
        """Take a turn out. O(log turns)."""
        self.version += 1
        index = bisect.bisect_left(self._turns, turn.order, key=lambda other: other.order)
        assert self._turns[index] is turn, "every turn has an order of its own"
        del self._turns[index]


class _Known(NamedTuple):
    """A quote, and what it was made of. `match` is None for a resident session."""

    version: int
    match: MatchResult | None
    quote: AdmissionQuote


class Quotes:
    """What admitting waiting turns would cost."""

    def __init__(self, cache: SessionAwareCache, max_new_pages: PoolPages) -> None:
        """`max_new_pages`: of `TurnCapacity`."""
        self._cache = cache
        self._max_new_pages = max_new_pages
        self._known: dict[TurnId, _Known] = {}

    def of(self, turn: Turn) -> AdmissionQuote:
        """Return the price of a turn now.

        O(1) while nothing has changed in the tree, O(edges of its match) while that stands; else
        the history of a cold session is matched.
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
        """A turn waits no longer."""
        self._known.pop(turn.turn_id, None)

    def _price(self, turn: Turn) -> _Known:
        cache, session_id = self._cache, turn.request.session_id
        slot = cache.slot(session_id)
        reusable_len = _reusable_len(turn)
        if slot.state is SlotState.COLD:
            history = cache.tokens(session_id, 0, turn.request.base_len)
            tokens = np.concatenate((history, turn.uncommitted_tokens()))
            match = cache.peek(tokens[: reusable_len + 1], slot.namespace)
            quote = self._quote(turn, match.matched_len, match)
            return _Known(cache.match_version, match, quote)
        kept_len = cache.kept_len(session_id, min(turn.request.base_len, reusable_len))
        return _Known(cache.match_version, None, self._quote(turn, kept_len, None))

    def _quote(self, turn: Turn, reuse_len: int, match: MatchResult | None) -> AdmissionQuote:
        cache, page_size = self._cache, self._cache.spec.page_size
        # One page beyond the context, so that it is not retracted over its first tokens.
        soon_len = max(turn.known_len, min(turn.known_len + page_size, turn.max_computed_len))
        num_pages = pages_for(soon_len, page_size) - pages_for(reuse_len, page_size)
        pages = tuple([min(num_pages, most) for most in self._max_new_pages])
        if match is not None:
            # Pages that its match locks cannot be evicted for anybody any more.
            pages = add_pages(pages, [tuple([match.evictable_pages[p] for p in cache.paged_pools])])
        own = cache.idle.reclaimable(turn.request.session_id)
        return AdmissionQuote(
            num_uncomputed=turn.known_len - reuse_len,
            context_pages=pages,
            needs_row=match is not None,
            own_pages=None if own is None else tuple(own.freed_pages.values()),
        )


def _reusable_len(turn: Turn) -> int:
    """A forward needs a query, and a prompt's logprobs need its positions computed."""
    max_reuse_len = max_reuse(turn)
    last = turn.known_len - 1
    return last if max_reuse_len is None else min(last, max_reuse_len)


def max_reuse(turn: Turn) -> int | None:
    """Positions a turn may reuse; None for all. Prompt logprobs need logits, hence computing."""
    position = turn.next_prompt_logprob_position()
    if position is None or position >= turn.prompt_len - 1:
        return None
    return position


class Supply(NamedTuple):
    """What admission may take: pages that are free or can be evicted, and those of idle sessions;
    rows likewise."""

    pages: PoolPages
    num_rows: int

    def is_within(self, other: Supply) -> bool:
        """Whether it is no more than another one, in every pool."""
        pairs = zip(self.pages, other.pages, strict=True)
        return self.num_rows <= other.num_rows and all(mine <= its for mine, its in pairs)


class _Denial(NamedTuple):
    """A plan found that nobody of the line could come, and all that this depended on.

    Running turns took part in it by their number and by what they leave: `supply` is the most there
    has been since, so less of it is no reason to ask again.
    """

    blocked: tuple[TurnId, BlockReason]
    versions: tuple[int, int]
    num_running: int
    supply: Supply


class WaitingQueue(TurnQueue):
    """Turns that wait for admission."""

    def __init__(self, cache: SessionAwareCache, max_new_pages: PoolPages) -> None:
        super().__init__()
        self._cache = cache
        self._denial: _Denial | None = None
        self.quotes = Quotes(cache, max_new_pages)

    def remove(self, turn: Turn) -> None:
        """Take a turn out, whose price nobody needs any more."""
        super().remove(turn)
        self.quotes.drop(turn)

    def note_denial(
        self, blocked: tuple[TurnId, BlockReason], num_running: int, supply: Supply
    ) -> None:
        """Nobody could come with this supply beside so many running turns of which each lacked one
        position at most."""
        self._denial = _Denial(blocked, self._versions, num_running, supply)

    def known_denial(self, num_running: int, supply: Supply) -> tuple[TurnId, BlockReason] | None:
        """Who is blocked, and why, if that is known without pricing anybody."""
        denial = self._denial
        if denial is None or (denial.versions, denial.num_running) != (self._versions, num_running):
            return None
        return denial.blocked if supply.is_within(denial.supply) else None

    @property
    def has_denial(self) -> bool:
        """Whether asking `known_denial` may be worth it."""
        return self._denial is not None and bool(self)

    @property
    def _versions(self) -> tuple[int, int]:
        return self.version, self._cache.match_version
