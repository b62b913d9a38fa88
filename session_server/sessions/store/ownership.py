"""Why a database refuses what a replica writes: the session, or its own lease, is not its any more.

A store that several replicas share gives each session one holder, with an epoch that counts up
whenever it changes hands. Every write names both.
"""

from __future__ import annotations

from typing import NamedTuple


class NotOurs(Exception):
    """Report a write that was refused for good: the session goes on elsewhere."""


class Moved(NotOurs):
    """Report that another replica holds the session now, or that it is gone."""


class LeaseLost(NotOurs):
    """Report that this replica's own lease is over: others may have taken what it held."""


class NameTaken(NotOurs):
    """Report that another open session of the owner has this id."""


class HeldBy(NamedTuple):
    """Name the live replica that holds a session. `address`: where clients reach it; "" where they
    reach all replicas in one place."""

    number: int
    replica_id: int
    address: str
