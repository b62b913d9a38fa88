"""`SessionSlot`: hold the engine's record of one session.

The slot owns the history and at most one lease; a turn borrows both. SGLang copies a dozen fields
between its request and its slot. Here `restore_to_req` lends the lease itself, so there is no
second copy that could become stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cache.errors import HistoryMismatch, SlotBusy
from cache.int_buffer import IntBuffer
from cache.lease import KVLease
from cache.types import Namespace, PoolName, Retention, SessionId, SlotState, Tokens, TurnId

TRANSITIONS: Final[Mapping[SlotState, frozenset[SlotState]]] = {
    SlotState.COLD: frozenset({SlotState.LENT, SlotState.PARKED}),
    SlotState.LENT: frozenset({SlotState.PARKED, SlotState.COLD, SlotState.CLOSING}),
    SlotState.PARKED: frozenset({SlotState.LENT, SlotState.COLD}),
    SlotState.CLOSING: frozenset(),
}
"""Which state may follow which. A slot may also be removed while COLD, PARKED or CLOSING."""


@dataclass(slots=True, eq=False)
class Tail:
    """Describe what a parked session holds behind its history, see `cache.tails`.

    `start`: the length of the history. `made_resident`: whether the session was cold before.
    `pages`: of each paged pool, those that go with the tail.
    """

    start: int
    made_resident: bool
    pages: dict[PoolName, int] = field(default_factory=dict)


class SessionSlot:
    """Hold one session. Written by `SessionAwareCache` and its `Tails` only.

    `tokens` is the history, the truth of which KV is a cache, and the tokens of the `tail` behind
    it. `lease` is None while COLD. `borrower` is the turn that may change it, None while idle.
    """

    __slots__ = (
        "borrower",
        "lease",
        "namespace",
        "retention",
        "session_id",
        "state",
        "tail",
        "tokens",
    )

    def __init__(self, session_id: SessionId, namespace: Namespace, retention: Retention) -> None:
        self.session_id = session_id
        self.namespace = namespace
        self.retention = retention
        self.tokens = IntBuffer()
        self.state = SlotState.COLD
        self.lease: KVLease | None = None
        self.borrower: TurnId | None = None
        self.tail: Tail | None = None

    @property
    def is_active(self) -> bool:
        """Return whether a turn has borrowed it. Derived, so no exit path can fail to reset it."""
        return self.borrower is not None

    @property
    def history_len(self) -> int:
        """Return the tokens of the history, with those of a running turn."""
        return len(self.tokens) if self.tail is None else self.tail.start

    def common_len(self, base_len: int, new_tokens: Sequence[int] | Tokens) -> int:
        """Return how many leading tokens of a context the slot holds: the first `base_len` of its
        history, and those of `new_tokens` that its tail begins with."""
        if self.tail is None or self.tail.start != base_len:
            return base_len
        tail = self.tokens.view(base_len, base_len + len(new_tokens))
        differs = np.flatnonzero(tail != np.asarray(new_tokens[: len(tail)], np.int32))
        return base_len + (int(differs[0]) if len(differs) else len(tail))

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
        if not 0 <= length <= self.history_len:
            raise HistoryMismatch(
                f"session {self.session_id} holds {self.history_len} tokens, not {length}"
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
        self.forget_tail()
        self.lease = None
        self.borrower = None
        self.state = SlotState.COLD

    def forget_tail(self) -> None:
        """Drop the tokens behind the history."""
        self.tokens.truncate(self.history_len)
        self.tail = None

    def move_to(self, state: SlotState) -> None:
        """Change state, along the transition table."""
        assert state in TRANSITIONS[self.state], f"{self.state.name} -> {state.name}"
        self.state = state
