"""Account for every page of KV: which session, turn or tree node holds it.

`SessionAwareCache` is the entry point: open sessions, lend their KV to turns, evict under pressure;
`audit` checks the accounts. Only `cache.pool` imports torch.
"""

from cache.capacity import BoundedPools, plan_capacity
from cache.checker import Violation, audit, find_violations
from cache.errors import (
    AuditFailed,
    CacheError,
    HistoryMismatch,
    NamespaceMismatch,
    OutOfPages,
    OutOfRows,
    PinQuotaExceeded,
    SlotBusy,
    SlotExists,
    UnknownSession,
)
from cache.ledger import Accounts
from cache.radix_node import MatchResult
from cache.session_cache import SessionAwareCache
from cache.session_slot import SessionSlot
from cache.spec import CacheSpec, Capacity, LayerGroup, LayerKind
from cache.types import Namespace, Retention, SessionId, SlotState, TableWrite, TurnId, pages_for
from cache.views import ParkedSession, SlotView, TurnLoan

__all__ = [
    "Accounts",
    "AuditFailed",
    "BoundedPools",
    "CacheError",
    "CacheSpec",
    "Capacity",
    "HistoryMismatch",
    "LayerGroup",
    "LayerKind",
    "MatchResult",
    "Namespace",
    "NamespaceMismatch",
    "OutOfPages",
    "OutOfRows",
    "ParkedSession",
    "PinQuotaExceeded",
    "Retention",
    "SessionAwareCache",
    "SessionId",
    "SessionSlot",
    "SlotBusy",
    "SlotExists",
    "SlotState",
    "SlotView",
    "TableWrite",
    "TurnId",
    "TurnLoan",
    "UnknownSession",
    "Violation",
    "audit",
    "find_violations",
    "pages_for",
    "plan_capacity",
]
