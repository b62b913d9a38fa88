"""What the façade answers: frozen values, made per call, owned by the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cache.session_slot import SessionSlot
from cache.types import (
    Namespace,
    PoolName,
    Retention,
    RowId,
    SessionId,
    SlotState,
    TableWrite,
    TurnId,
)


@dataclass(frozen=True, slots=True)
class TurnLoan:
    """A turn's borrowed lease, as it was when it was lent.

    `cached_len`: positions whose KV is there; computing starts at it. `table_writes`: entries the
    device does not know yet.
    """

    row: RowId
    cached_len: int
    table_writes: tuple[TableWrite, ...]


@dataclass(frozen=True, slots=True)
class IdleSession:
    """A parked session and what cooling it gives back, per pool, now.

    Pages shared with another parked session count for neither, so cooling both may free more.
    """

    session_id: SessionId
    freed_pages: Mapping[PoolName, int]


class SlotView(NamedTuple):
    """One session at one moment. Lengths are tokens; `num_tokens` is the history's."""

    session_id: SessionId
    namespace: Namespace
    retention: Retention
    state: SlotState
    borrower: TurnId | None
    num_tokens: int
    protected_len: int
    committed_len: int
    allocated_len: int
    protected_pages: Mapping[PoolName, int]
    private_pages: Mapping[PoolName, int]

    @classmethod
    def of(cls, slot: SessionSlot, pools: Iterable[PoolName]) -> SlotView:
        """A slot as it is now, with its pages in each of `pools`."""
        lease = slot.lease
        return cls(
            session_id=slot.session_id,
            namespace=slot.namespace,
            retention=slot.retention,
            state=slot.state,
            borrower=slot.borrower,
            num_tokens=len(slot.tokens),
            protected_len=slot.cache_protected_len,
            committed_len=slot.kv_committed_len,
            allocated_len=slot.kv_allocated_len,
            protected_pages={pool: lease.num_protected(pool) if lease else 0 for pool in pools},
            private_pages={pool: lease.num_private(pool) if lease else 0 for pool in pools},
        )
