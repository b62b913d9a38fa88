"""Memory checker: recount every page from the structures that hold it, and compare.

No check trusts the ledger, a cached count or a flag. A violation is always a bug of the server. It
names the session whose pages are in doubt if there is one, so that a server can quarantine that
session and continue, while tests raise.
docs/memory.md lists the levels.
"""

from __future__ import annotations

from cache.pair_check import Violation, slot_violations
from cache.recount import Recount
from cache.session_cache import SessionAwareCache
from cache.types import SessionId

__all__ = ["Recount", "Violation", "find_violations"]

_EVERYTHING = 1 << 60
"""Enough units to make a recount in one call."""


def find_violations(
    cache: SessionAwareCache, level: int = 2, session_id: SessionId | None = None
) -> list[Violation]:
    """Return all violations at a level of the memory check. Changes nothing.

    With `session_id`, level 1 checks only that slot, if it still exists. Level 2 costs O(pages) in
    this one call; `Recount` makes it in slices.
    """
    stores, slots = cache.inspect()
    found = [
        Violation(f"{ledger.pool}: the accounts do not sum to the pool: {ledger.snapshot()}")
        for ledger in stores.ledgers.values()
        if not ledger.is_balanced()
    ]
    if level == 1:
        named = slots.values() if session_id is None else filter(None, [slots.get(session_id)])
        for slot in named:
            found += slot_violations(slot, stores, whole=False)
    if level == 2:
        recount = Recount(cache)
        recount.advance(_EVERYTHING)
        recount.stop()
        found += recount.violations
    return found
