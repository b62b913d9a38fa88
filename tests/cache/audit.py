"""Raise an error on any violation of the accounts."""

from __future__ import annotations

from cache.checker import find_violations
from cache.errors import AuditFailed
from cache.session_cache import SessionAwareCache
from cache.types import SessionId


def audit(cache: SessionAwareCache, level: int = 2, session_id: SessionId | None = None) -> None:
    """Raise `AuditFailed` with every violation that `find_violations` returns."""
    violations = find_violations(cache, level, session_id)
    if violations:
        raise AuditFailed("; ".join(violation.text for violation in violations))
