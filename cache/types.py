"""The small vocabulary every module of `cache` shares.

Lengths are tokens, capacity is pages, and `pages_for` is the one function that converts. A *pool*
is one kind of device memory (full-attention KV, window KV, MLA latent, recurrent state); its name
is the name of the component that rules it, see `cache.spec`.
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
"""Padding: read and written harmlessly by padded batches, never handed out."""

NULL_ROW: Final = RowId(0)
"""Padding row of the page table; every entry points at `NULL_PAGE`."""


class Holder(IntEnum):
    """Who answers for a page. Every page of a pool has exactly one holder at any time."""

    FREE = 0
    RESERVED = 1
    TREE = 2
    ACTIVE = 3
    SESSION_HELD = 4
    FENCED = 5
    SPILL = 6
    QUARANTINE = 7


class Retention(Enum):
    """What pressure may do to a parked session."""

    RECLAIMABLE = "reclaimable"
    PINNED = "pinned"


class SlotState(Enum):
    """Life of a `SessionSlot`; `cache.session_slot` has the transition table."""

    COLD = auto()
    PARKED = auto()
    LENT = auto()
    CLOSING = auto()


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose KV may match whose: a typed tuple, never a concatenated string.

    Tree nodes and slots are keyed by it, so KV is shared only between equal namespaces.
    """

    tenant_salt: str
    model_fingerprint: str


class TableWrite(NamedTuple):
    """One delta of the host page table, to be mirrored on the device in launch order.

    `pages`: int32 [n], written to entries [start, start + n) of `row` in the table of `pool`.
    """

    pool: PoolName
    row: RowId
    start: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class StateMoves:
    """What one forward does to the recurrent state of a row.

    `source`: the page with the state it goes on from, or `NULL_PAGE` at the beginning of a session,
    where the state is zero. `targets`: (length, page) pairs, ascending: where the state after so
    many tokens goes. The last one is the end of the row; one before it is wanted as a snapshot. No
    target is read by any forward launched before, so every state a forward has read stays as it is.
    """

    source: int
    targets: tuple[tuple[int, int], ...]


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages needed to hold `num_tokens` positions."""
    return -(-num_tokens // page_size)
