"""`SessionSlot`: hold the engine's record of one session.

The slot owns the history and at most one lease; a turn borrows both. SGLang copies a dozen fields
between its request and its slot. Here `restore_to_req` lends the lease itself, so there is no
second copy that could become stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cache.errors import HistoryMismatch, SlotBusy
from cache.int_buffer import IntBuffer
from cache.lease import KVLease
from cache.types import Namespace, Retention, SessionId, SlotState, TurnId

TRANSITIONS: Final[Mapping[SlotState, frozenset[SlotState]]] = {
    SlotState.COLD: frozenset({SlotState.LENT}),
    SlotState.LENT: frozenset({SlotState.PARKED, SlotState.COLD, SlotState.CLOSING}),
    SlotState.PARKED: frozenset({SlotState.LENT, SlotState.COLD}),
    SlotState.CLOSING: frozenset(),
}
"""Which state may follow which. A slot may also be removed while COLD, PARKED or CLOSING."""


class SessionSlot:
    """Hold one session. Written by `SessionAwareCache` only.

    `tokens` is the history, the truth of which KV is a cache. `lease` is None while COLD.
    `borrower` is the turn that may change it, None while idle.
    """

    __slots__ = ("borrower", "lease", "namespace", "retention", "session_id", "state", "tokens")

    def __init__(self, session_id: SessionId, namespace: Namespace, retention: Retention) -> None:
        self.session_id = session_id
        self.namespace = namespace
        self.retention = retention
        self.tokens = IntBuffer()
        self.state = SlotState.COLD
        self.lease: KVLease | None = None
        self.borrower: TurnId | None = None

    @property
    def is_active(self) -> bool:
        """Return whether a turn has borrowed it. Derived, so no exit path can fail to reset it."""
        return self.borrower is not None

    @property
    def cache_protected_len(self) -> int:
        """Return the tokens in pages that the tree owns and this slot has locked; whole pages."""
        return self.lease.protected_len if self.lease else 0

    @property
    def kv_committed_len(self) -> int:
        """Return the tokens whose KV is valid."""
        return self.lease.computed_len if self.lease else 0

    @property
    def kv_allocated_len(self) -> int:
        """Return the tokens that its pages have room for."""
        return self.lease.capacity_len if self.lease else 0

    def restore_to_req(self, turn_id: TurnId) -> KVLease:
        """Lend the lease to a turn, by reference.

        Clears nothing, frees nothing; repeating the call for the same turn returns the same lease.
        A cold slot must be given a lease before.

        Raises:
            SlotBusy: another turn has it, or the session is closing; nothing was changed.
        """
        assert self.lease is not None, "a cold slot has nothing to lend"
        if self.borrower == turn_id:
            return self.lease
        self.check_not_busy()
        if self.state is SlotState.PARKED:
            self.lease.lend()
        self.borrower = turn_id
        self.move_to(SlotState.LENT)
        return self.lease

    def check_not_busy(self) -> None:
        """Raise `SlotBusy` while a turn has borrowed the slot."""
        if self.is_active:
            raise SlotBusy(f"session {self.session_id} is {self.state.name} to {self.borrower}")

    def check_history_len(self, length: int) -> None:
        """Raise `HistoryMismatch` when the history is shorter."""
        if not 0 <= length <= len(self.tokens):
            raise HistoryMismatch(
                f"session {self.session_id} holds {len(self.tokens)} tokens, not {length}"
            )

    def end_loan(self) -> None:
        """End the loan: PARKED if the slot still has a lease, COLD otherwise."""
        assert self.is_active, "only a loan can end"
        self.borrower = None
        if self.lease is None:
            self.move_to(SlotState.COLD)
        else:
            self.lease.park()
            self.move_to(SlotState.PARKED)

    def reset(self) -> None:
        """Make the slot COLD from any state, without releasing the lease: for `rebuild`, which
        drops the stores that the lease is in."""
        self.lease = None
        self.borrower = None
        self.state = SlotState.COLD

    def move_to(self, state: SlotState) -> None:
        """Change state, along the transition table."""
        assert state in TRANSITIONS[self.state], f"{self.state.name} -> {state.name}"
        self.state = state
