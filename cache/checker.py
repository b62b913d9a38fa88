"""The memory checker: recount every page from the structures that hold it, and compare.

Nothing here trusts the ledger, a cached count or a flag. A violation is always a bug of ours; it
names the session whose pages are in doubt where one can be named, so that service can quarantine
that session and go on, while tests raise.

level 0   every step        O(pools)       accounts sum to the pool
level 1   end of a turn     O(that turn)   the pair check: lock path + private pages = row
level 2   idle, on demand   O(pages)       all slots, all pages, all locks, all rows
level 3   sampled           one page       the content itself, read by the device: `cache.content`
"""

from __future__ import annotations

from cache.errors import AuditFailed
from cache.pair_check import Violation, slot_violations
from cache.recount import Recount
from cache.session_cache import SessionAwareCache
from cache.types import SessionId

__all__ = ["Recount", "Violation", "audit", "find_violations"]

_EVERYTHING = 1 << 60
"""Units of a recount that is made in one go."""


def audit(cache: SessionAwareCache, level: int = 2, session_id: SessionId | None = None) -> None:
    """Raise on any violation; the form for tests and strict mode.

    Raises:
        AuditFailed: with every violation found.
    """
    violations = find_violations(cache, level, session_id)
    if violations:
        raise AuditFailed("; ".join(violation.text for violation in violations))


def find_violations(
    cache: SessionAwareCache, level: int = 2, session_id: SessionId | None = None
) -> list[Violation]:
    """Check at a level, in one go; with `session_id`, level 1 looks at that slot only (if it still
    exists). Changes nothing.

    What a recount costs in one go grows with what the cache holds: `Recount` makes it in slices.
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
