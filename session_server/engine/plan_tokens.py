"""Price waiting turns, and split the token budget of one forward. Pages are not looked at here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from cache.types import TurnId
from session_server.engine.scheduler_view import (
    FLOOD_FORWARDS,
    AdmissionQuote,
    Limits,
    Load,
    RunningTurn,
    SchedulerView,
    WaitingTurn,
)
from session_server.engine.shares import (
    MAX_SHARES,
    fair_shares,
    flooded_shares,
    share_len,
    tenant_shares,
)
from session_server.engine.tenant_lines import CREDIT_TOKENS

LAG_FORWARDS: Final = 4
"""Full forwards by which a tenant is behind to have all that it needs of the next. Two that both
flood the server are nearly even."""


class Shares(msgspec.Struct, frozen=True, gc=False):
    """Hold the prefill tokens of each turn, `num_tokens` at most, and what the next plan has to
    know. A turn that is missing gets none."""

    tokens: dict[TurnId, int]
    num_tokens: int
    load: Load = Load()


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
    *,
    view: SchedulerView,
) -> Shares:
    """Return the tokens of each turn.

    `limits.num_tokens` is split among the `candidates` and the running turns that are `prefilling`:
    those that lack more than one position.
    """
    split = _split_by_tenant(prefilling, candidates, view, limits)
    shares = split.tokens
    if candidates:
        long = [turn for turn in prefilling if shares[turn.turn_id] < turn.num_uncomputed]
        # Prefills that take several forwards occupy up to half of the places, so that a crowd of
        # long prompts leaves room for short turns.
        num_long_places = max(0, max(1, limits.num_turns // 2) - len(long))
        admissible = _admissible(candidates, shares, long, num_long_places)
        del admissible[limits.num_turns - len(running) :]
        if len(admissible) < len(candidates):
            # Tokens of those that lack a place go to the others.
            load = split.load
            split = _split_by_tenant(prefilling, admissible, view, limits)
            load = msgspec.structs.replace(split.load, num_full=load.num_full)
            split = msgspec.structs.replace(split, load=load)
    # A decoding turn always gets its token, on top of the budget: no prefill stalls a stream.
    split.tokens.update((turn.turn_id, 1) for turn in running if turn.num_uncomputed == 1)
    return split


def _split_by_tenant(
    prefilling: Sequence[RunningTurn],
    candidates: Sequence[Candidate],
    view: SchedulerView,
    limits: Limits,
) -> Shares:
    """Split a forward among tenants, and what each has among its turns."""
    turns: dict[str, tuple[list[RunningTurn], list[Candidate]]] = {}
    for running in prefilling:
        turns.setdefault(running.tenant, ([], []))[0].append(running)
    for candidate in candidates:
        turns.setdefault(candidate.turn.tenant, ([], []))[1].append(candidate)
    if len(turns) <= 1 and not view.is_shared:
        return Shares(_split(prefilling, candidates, limits.num_tokens), limits.num_tokens)
    tenants = sorted(turns, key=view.served)
    needs = [
        sum(turn.num_uncomputed for turn in turns[tenant][0])
        + sum(candidate.quote.num_uncomputed for candidate in turns[tenant][1])
        for tenant in tenants
    ]
    # Those of the oldest prefill and of the first waiting turn, which always get a share.
    first = [tenants.index(turn.tenant) for turn in prefilling[:1]]
    first += [tenants.index(candidate.turn.tenant) for candidate in candidates[:1]]
    num_behind = sum(_is_behind(view.lag(tenant), limits) for tenant in tenants)
    is_full = sum(needs[num_behind:]) > share_len(limits.num_tokens)
    num_full = min(FLOOD_FORWARDS, max(0, view.load.num_full + (1 if is_full else -1)))
    num_tokens, has_postponed = limits.num_tokens, False
    # A forward of fewer tokens has no share to set apart.
    is_flood = view.load.is_flood and view.is_shared and num_tokens >= MAX_SHARES
    if is_flood:
        may_postpone = not view.load.has_postponed
        parts = flooded_shares(
            needs, num_tokens, num_behind=num_behind, first=first, may_postpone=may_postpone
        )
        num_tokens = sum(parts)
        has_postponed = num_behind < len(parts) and not any(parts[num_behind:])
    else:
        parts = tenant_shares(needs, num_tokens, first=first)
    tokens: dict[TurnId, int] = {}
    for tenant, part in zip(tenants, parts, strict=True):
        # One long turn of each then: a short forward of many rows takes as long as a full one.
        tokens |= _split(*turns[tenant], part, share=part // 2 + 1 if is_flood else None)
    return Shares(tokens, num_tokens, Load(num_full, has_postponed))


def _is_behind(lag: int, limits: Limits) -> bool:
    return lag >= min(LAG_FORWARDS * limits.num_tokens, CREDIT_TOKENS // 2)


def _split(
    prefilling: Sequence[RunningTurn],
    candidates: Sequence[Candidate],
    num_tokens: int,
    *,
    share: int | None = None,
) -> dict[TurnId, int]:
    """Split the tokens of a tenant among its turns; `share`: what each can count on."""
    needs = [turn.num_uncomputed for turn in prefilling]
    needs += [candidate.quote.num_uncomputed for candidate in candidates]
    # The oldest prefill and the first waiting turn always get a share, so that short turns that
    # keep coming cannot starve them.
    shares = fair_shares(needs, num_tokens, first=(0, len(prefilling)), share=share)
    ids = [turn.turn_id for turn in prefilling]
    ids += [candidate.turn.turn_id for candidate in candidates]
    return dict(zip(ids, shares, strict=True))


def _admissible(
    candidates: Sequence[Candidate],
    shares: Mapping[TurnId, int],
    long: Sequence[RunningTurn],
    num_long_places: int,
) -> list[Candidate]:
    """Return those that reach their next token in this forward, and `num_long_places` of those that
    only begin in it: the first in line, which would starve otherwise, then the shortest. Beside
    turns of others a tenant has one place in any case: `long` are those that have places.
    """
    begun = [
        candidate
        for candidate in candidates
        if shares[candidate.turn.turn_id] > 0 and not candidate.reaches_token(shares)
    ]
    begun.sort(key=lambda c: (c is not candidates[0], c.quote.num_uncomputed))
    num_held = Counter(turn.tenant for turn in long)
    long_ids: set[TurnId] = set()
    for candidate in begun:
        tenant = candidate.turn.tenant
        if len(long_ids) < num_long_places or (num_held and not num_held[tenant]):
            long_ids.add(candidate.turn.turn_id)
            num_held[tenant] += 1
    return [c for c in candidates if c.reaches_token(shares) or c.turn.turn_id in long_ids]
