"""Who may write a session that several replicas share: what is told of that, and by whom.

A session has one holder, a replica whose lease has not ended, and an epoch, which rises whenever
somebody takes it. Every commit names both, and is refused where they are not the current ones.
"""

from __future__ import annotations

from typing import NamedTuple


class NotOurs(Exception):
    """Report a write that was refused for good: what it is about goes on elsewhere."""


class Moved(NotOurs):
    """Report a session that another replica holds now, or has deleted: it is no longer here."""


class LeaseLost(NotOurs):
    """Report that this replica's own lease is over: nothing that it holds is its own any more. It
    may join again, as another replica."""


class NameTaken(NotOurs):
    """Report another open session of the same owner and id; or, of a record, another one of the
    same number, or of the same owner and id."""


class Joined(NamedTuple):
    """Tell a replica which one it is. `slot`: the smallest that no other has. `now_s`: the clock of
    the database, in unix seconds."""

    replica_id: int
    slot: int
    now_s: float


class HeldBy(NamedTuple):
    """Say that another replica, whose lease has not ended, holds a session. `address`: as it joined
    with."""

    number: int
    replica_id: int
    address: str
