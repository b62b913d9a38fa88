"""Who holds which page of KV, and why.

`SessionAwareCache` is the door: sessions are opened, turns borrow their KV, pressure evicts,
`audit` proves the books. Nothing here imports torch; device tensors are in `cache.pool`.
"""

from cache.capacity import ForgetfulRoom, plan_capacity
from cache.checker import Violation, audit, find_violations
from cache.errors import (
    AuditFailed,
    CacheError,
    HistoryMismatch,
    NamespaceMismatch,
    OutOfPages,
    OutOfRows,
    PinQuotaExceeded,
    SessionExists,
    SlotBusy,
    UnknownSession,
)
from cache.ledger import Accounts
from cache.radix_node import MatchResult
from cache.session_cache import SessionAwareCache
from cache.session_slot import SessionSlot
from cache.spec import CacheSpec, Capacity, LayerGroup, LayerKind
from cache.types import Namespace, Retention, SessionId, SlotState, TableWrite, TurnId, pages_for
from cache.views import IdleSession, SlotView, TurnLoan

__all__ = [
    "Accounts",
    "AuditFailed",
    "CacheError",
    "CacheSpec",
    "Capacity",
    "ForgetfulRoom",
    "HistoryMismatch",
    "IdleSession",
    "LayerGroup",
    "LayerKind",
    "MatchResult",
    "Namespace",
    "NamespaceMismatch",
    "OutOfPages",
    "OutOfRows",
    "PinQuotaExceeded",
    "Retention",
    "SessionAwareCache",
    "SessionExists",
    "SessionId",
    "SessionSlot",
    "SlotBusy",
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
