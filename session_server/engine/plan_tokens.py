"""Price waiting turns, and split the token budget of one forward. Pages are not looked at here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from cache.types import TurnId
from session_server.engine.scheduler_view import (
    AdmissionQuote,
    Limits,
    RunningTurn,
    SchedulerView,
    WaitingTurn,
)
from session_server.engine.shares import fair_shares, share_len


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """Hold a waiting turn and its price."""

    turn: WaitingTurn
    quote: AdmissionQuote

    def reaches_token(self, shares: Mapping[TurnId, int]) -> bool:
        """Return whether its share is all it lacks, so that this forward samples for it."""
        return shares.get(self.turn.turn_id, 0) == self.quote.num_uncomputed


def price_waiting(
    view: SchedulerView, running: Sequence[RunningTurn], limits: Limits
) -> Iterator[Candidate]:
    """Yield waiting turns with their prices, in order, as many as one forward could serve.

    A quote may match a whole history against the radix tree, so turns that cannot be admitted now
    are not priced.
    """
    if len(running) >= limits.num_turns:
        return
    short_len, num_short_tokens = share_len(limits.num_tokens), 0
    for turn in itertools.islice(view.waiting, limits.num_turns):
        # Short turns get all they lack. Once they fill the forward, no turn behind them gets a
        # token, so its price is not needed.
        if num_short_tokens >= limits.num_tokens:
            return
        candidate = Candidate(turn, turn.quote())
        num_uncomputed = candidate.quote.num_uncomputed
        num_short_tokens += num_uncomputed if num_uncomputed <= short_len else 0
        yield candidate


def share_tokens(
    running: Sequence[RunningTurn],
    prefilling: Sequence[RunningTurn],
    candidates: Sequence[Candidate],
    limits: Limits,
) -> dict[TurnId, int]:
    """Return the tokens of each turn; a turn that is missing gets none.

    `limits.num_tokens` is split among the `candidates` and the running turns that are `prefilling`:
    those that lack more than one position.
    """
    shares: dict[TurnId, int] = {}
    if prefilling or candidates:
        shares = _split(prefilling, candidates, limits)
    if candidates:
        num_long = sum(shares[turn.turn_id] < turn.num_uncomputed for turn in prefilling)
        # Prefills that take several forwards occupy up to half of the places, so that a crowd of
        # long prompts leaves room for short turns.
        num_long_places = max(0, max(1, limits.num_turns // 2) - num_long)
        admissible = _admissible(candidates, shares, num_long_places)
        del admissible[limits.num_turns - len(running) :]
        if len(admissible) < len(candidates):
            # Tokens of those that lack a place go to the others.
            shares = _split(prefilling, admissible, limits)
    # A decoding turn always gets its token, on top of the budget: no prefill stalls a stream.
    shares.update((turn.turn_id, 1) for turn in running if turn.num_uncomputed == 1)
    return shares


def _split(
    prefilling: Sequence[RunningTurn], candidates: Sequence[Candidate], limits: Limits
) -> dict[TurnId, int]:
    needs = [turn.num_uncomputed for turn in prefilling]
    needs += [candidate.quote.num_uncomputed for candidate in candidates]
    # The oldest prefill and the first waiting turn always get a share, so that short turns that
    # keep coming cannot starve them.
    shares = fair_shares(needs, limits.num_tokens, first=(0, len(prefilling)))
    ids = [turn.turn_id for turn in prefilling]
    ids += [candidate.turn.turn_id for candidate in candidates]
    return dict(zip(ids, shares, strict=True))


def _admissible(
    candidates: Sequence[Candidate], shares: Mapping[TurnId, int], num_long_places: int
) -> list[Candidate]:
    """Return those that reach their next token in this forward, and `num_long_places` of those that
    only begin in it: the first in line, which would starve otherwise, then the shortest.
    """
    begun = [
        candidate
        for candidate in candidates
        if shares[candidate.turn.turn_id] > 0 and not candidate.reaches_token(shares)
    ]
    begun.sort(key=lambda c: (c is not candidates[0], c.quote.num_uncomputed))
    long_ids = {candidate.turn.turn_id for candidate in begun[:num_long_places]}
    return [c for c in candidates if c.reaches_token(shares) or c.turn.turn_id in long_ids]
