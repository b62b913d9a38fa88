"""Define the types that every module of `cache` shares.

Lengths are in tokens, capacities in pages; only `pages_for` converts. A *pool* is one kind of
device memory: full-attention KV, window KV, MLA latents or recurrent states. A *bounded* pool is
one in which the pages of a session do not grow with its history: windows and recurrent states.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Final, NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

SessionId = NewType("SessionId", str)
TurnId = NewType("TurnId", str)
TokenId = NewType("TokenId", int)
PageId = NewType("PageId", int)
RowId = NewType("RowId", int)
PoolName = NewType("PoolName", str)

Tokens = NDArray[np.int32]
"""Token ids, int32 [length]."""

Pages = NDArray[np.int32]
"""Page ids in order of position, int32 [num_pages]."""

NULL_PAGE: Final = PageId(0)
"""Padding page: padded batches read and write it; it is never allocated."""

NULL_ROW: Final = RowId(0)
"""Padding row of the page table; all its entries are `NULL_PAGE`."""


class Holder(IntEnum):
    """Name the account of a page. Every page of a pool is in exactly one at any time."""

    FREE = 0
    RESERVED = 1
    TREE = 2
    ACTIVE = 3
    SESSION_HELD = 4
    FENCED = 5
    SPILL = 6
    QUARANTINE = 7


class Retention(Enum):
    """Say whether memory pressure may cool a parked session."""

    RECLAIMABLE = "reclaimable"
    PINNED = "pinned"


class SlotState(Enum):
    """Name the states of a `SessionSlot`; `cache.session_slot` has the transition table."""

    COLD = auto()
    PARKED = auto()
    LENT = auto()
    CLOSING = auto()


@dataclass(frozen=True, slots=True)
class Namespace:
    """Identify the sessions that may share KV: those of one tenant and one model.

    Tree nodes and slots are keyed by it. A tuple of fields, never a concatenated string, so two
    different namespaces cannot collide. `tenant`: whose memory the sessions take; one tenant may
    have many salts.
    """

    tenant_salt: str
    model_fingerprint: str
    tenant: str = ""


class TableWrite(NamedTuple):
    """Describe one change of the host page table, to be applied on the device in launch order.

    `pages`: int32 [n], written to entries [start, start + n) of `row` in the table of `pool`.
    """

    pool: PoolName
    row: RowId
    start: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Describe which recurrent states of a row one forward reads and writes.

    `source`: the page with the state before its first token, or `NULL_PAGE` at the beginning of a
    session, where the state is zero. `targets`: (length, page) pairs, ascending: the page for the
    state after `length` tokens. The last is the state at the end; one before it becomes a snapshot.
    No forward launched earlier reads a target, so no state is overwritten before it was read.
    """

    source: int
    targets: tuple[tuple[int, int], ...]


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the pages needed for `num_tokens` positions."""
    return -(-num_tokens // page_size)
