"""Take sessions, and give them up: one replica holds each, by the clock of the database.

A replica is a row with the time at which its lease ends. Each of its commits locks that row FOR KEY
SHARE. To renew the lease does not conflict with that, however many sessions it stands for. Whoever
takes a session of a replica whose lease has ended deletes the row first, which does conflict: it
waits until a commit under way is over, and none can begin after it. So a replica that was paused
may go on to compute, but never to write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

import psycopg
from psycopg_pool import ConnectionPool

from session_server.sessions.postgres.connections import (
    ANSWER_WAIT_S,
    KeptConnection,
    PostgresConnection,
)
from session_server.sessions.postgres.notifications import Notifications, channel_of
from session_server.sessions.postgres.reads import NO_REPLICA, PostgresReads, is_name
from session_server.sessions.postgres.schema import COLUMNS
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.ownership import HeldBy, Joined, LeaseLost
from session_server.sessions.store.records import SessionRow

MAX_REPLICAS: Final = 1024
"""Replicas that share a store: slots are below this."""

RELEASED_AT_ONCE: Final = 256
"""Sessions that one transaction gives up."""

_MAX_BURIED: Final = 8
"""Replicas that are over and that one `take` finds in the way, one after another."""

_JOINING: Final = 0x53535254
"""What replicas lock that join at once, so that none takes the slot of another."""

_FIRST_RENEWAL: Final = 1 / 3
"""Of a lease: how long a renewal waits before it is asked anew over another connection. One that
says nothing any more costs no lease."""

LEASE: Final = "SELECT FROM replicas WHERE id = %s AND expires > clock_timestamp() FOR KEY SHARE"

_ENDS: Final = "clock_timestamp() + make_interval(secs => %(lease_s)s)"
_NOW_S: Final = "extract(epoch FROM clock_timestamp())::double precision"
IS_OVER: Final = f"expires < {_NOW_S}"
"""What is true of a session that has expired."""

_LET_GO: Final = (
    "WITH freed AS (UPDATE sessions SET holder = NULL WHERE holder = %(me)s AND number {which}"
    " RETURNING number) SELECT max(number) FROM freed HAVING count(*) > 0"
)
_THESE: Final = _LET_GO.format(which="= ANY(%(numbers)s::bigint[])")
_NEXT: Final = _LET_GO.format(
    # Behind those of the slice before, so that none is looked at twice.
    which="IN (SELECT number FROM sessions WHERE holder = %(me)s AND number > %(after)s"
    " ORDER BY number LIMIT %(limit)s)"
)


_T = TypeVar("_T")


class _Free(NamedTuple):
    """Hold the number of a session that nobody else holds."""

    number: int


class Leases(PostgresReads):
    """Hold sessions for one replica, once it has joined. Any thread may call this."""

    def __init__(self, pool: ConnectionPool[PostgresConnection], conninfo: str, place: str) -> None:
        super().__init__(pool)
        self._conninfo, self._place = conninfo, place
        self._own = KeptConnection(conninfo)
        self._listener: Notifications | None = None
        self.slot = 0

    def join(self, address: str, lease_s: float, *, role: str = "both") -> Joined:
        """Become a replica that others reach at an address, for so many seconds. Whatever this
        process held as another one it does not hold any more. Raises StoreUnusable with too many
        replicas, psycopg.Error."""
        joined = self._over_own(partial(self._join, (address, role), lease_s), ANSWER_WAIT_S)
        self._stop_listening()
        self.replica_id, self.slot = joined.replica_id, joined.slot
        self._listener = Notifications(self._conninfo, joined.replica_id)
        return joined

    def _join(
        self, named: tuple[str, str], lease_s: float, connection: PostgresConnection
    ) -> Joined:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_JOINING,))
            # Slots of those that are over; but nobody waits for what one of them still commits.
            connection.execute(
                "DELETE FROM replicas WHERE id IN (SELECT id FROM replicas"
                " WHERE expires <= clock_timestamp() FOR UPDATE SKIP LOCKED)"
            )
            query = (
                "INSERT INTO replicas (slot, address, role, expires)"  # noqa: S608 - our own words
                f" SELECT min(free), %(address)s, %(role)s, {_ENDS}"
                " FROM generate_series(0, %(last)s) AS free"
                " WHERE NOT EXISTS (SELECT FROM replicas WHERE slot = free)"
                f" HAVING count(*) > 0 RETURNING id, slot, {_NOW_S}"
            )
            address, role = named
            last_slot = MAX_REPLICAS - 1
            values = {"address": address, "role": role, "lease_s": lease_s, "last": last_slot}
            found = connection.execute(query, values).fetchone()
        if found is None:
            raise StoreUnusable(
                f"--store {self._place}: {MAX_REPLICAS} replicas share it: stop one"
            )
        return Joined(*found)

    def peers(self, role: str) -> list[tuple[int, str]]:
        """Return id and address of each other replica of a role that can be reached. Raises
        psycopg.Error."""
        query = (
            "SELECT id, address FROM replicas WHERE role = %(role)s AND address <> ''"
            " AND id <> %(me)s AND expires > clock_timestamp() ORDER BY id"
        )
        values = {"role": role, "me": self.replica_id}
        return [(int(found[0]), str(found[1])) for found in self._read(query, values)]

    def renew(self, lease_s: float) -> float:
        """Hold everything for so many seconds from now on, and return the clock of the database in
        unix seconds. Waits behind no read, and for no longer than the lease if the database can be
        reached. Raises LeaseLost, psycopg.Error."""
        query = (
            f"UPDATE replicas SET expires = {_ENDS} WHERE id = %(me)s"  # noqa: S608
            f" AND expires > clock_timestamp() RETURNING {_NOW_S}"
        )
        values = {"lease_s": lease_s, "me": self.replica_id}

        def ask(connection: PostgresConnection) -> tuple[float] | None:
            return connection.execute(query, values, binary=True).fetchone()

        found = self._over_own(ask, _FIRST_RENEWAL * lease_s, lease_s)
        if found is None:
            raise LeaseLost(f"replica {self.replica_id} has not renewed its lease in time")
        return float(found[0])

    def address_of(self, replica_id: int) -> str | None:
        """Return where a replica is reached, "" where it has not said; None if its lease is over.
        Raises psycopg.Error."""
        query = "SELECT address FROM replicas WHERE id = %s AND expires > clock_timestamp()"
        found = self._read(query, (replica_id,))
        return str(found[0][0]) if found else None

    def leave(self) -> None:
        """Give up all sessions, and the lease. Raises psycopg.Error."""
        values = {"me": self.replica_id, "limit": RELEASED_AT_ONCE, "after": 0}
        while freed := self._read(_NEXT, values):
            values["after"] = freed[0][0]
        self._over_own(partial(_delete_replica, self.replica_id), ANSWER_WAIT_S)
        self._stop_listening()
        self.replica_id = NO_REPLICA

    def take(
        self, owner_id: str, session_id: str, without: Container[int] = ()
    ) -> SessionRow | HeldBy | None:
        """Hold a session in a new epoch, and return it; or say who else holds it, which is asked
        first: that one knows whether it has expired. None if it has, is not there, or its number is
        among those it is to be `without`. Once a session is taken nobody else writes it. Raises
        LeaseLost, psycopg.Error."""
        if not is_name(session_id):
            return None
        for _ in range(_MAX_BURIED):
            found = self._over_pool(partial(self._try_to_take, (owner_id, session_id), without))
            if not isinstance(found, int):
                return found
            # Nothing is locked meanwhile that a commit of that one may need.
            self._over_pool(partial(_bury, found))
        raise AssertionError("replicas hold a session one after another that are all over")

    def _try_to_take(
        self, name: tuple[str, str], without: Container[int], connection: PostgresConnection
    ) -> SessionRow | HeldBy | int | None:
        """As `take`; but return the id of a replica that is over, and to be buried."""
        with connection.transaction():
            if connection.execute(LEASE, (self.replica_id,)).rowcount != 1:
                raise LeaseLost(f"the lease of replica {self.replica_id} is over")
            # Without a lock first: that somebody holds it is not told behind a commit of that one.
            found = self._look(connection, name)
            if isinstance(found, _Free):
                found = self._look(connection, name, lock=" FOR NO KEY UPDATE")
            if not isinstance(found, _Free):
                return found
            if found.number in without:
                return None
            query = (
                "UPDATE sessions SET holder = %s, epoch = epoch + 1 WHERE number = %s"  # noqa: S608
                f" RETURNING {COLUMNS}"
            )
            values = (self.replica_id, found.number)
            taken = connection.execute(query, values, binary=True).fetchone()
            assert taken is not None, "a locked row is gone"
            return SessionRow(*taken)

    def _look(
        self, connection: PostgresConnection, name: tuple[str, str], *, lock: str = ""
    ) -> _Free | HeldBy | int | None:
        """Say whether a session may be taken; else as `_try_to_take`."""
        query = (
            f"SELECT number, holder, {IS_OVER} FROM sessions"  # noqa: S608 - our own words
            f" WHERE owner = %s AND id = %s{lock}"
        )
        session = connection.execute(query, name).fetchone()
        if session is None:
            return None
        number, holder, is_over = session
        if holder is not None and holder != self.replica_id:
            # In a statement of its own: it sees who has joined until the lock was there.
            query = "SELECT address, expires > clock_timestamp() FROM replicas WHERE id = %s"
            address, is_live = connection.execute(query, (holder,)).fetchone() or (None, False)
            if is_live:
                return HeldBy(number, holder, address)
            if address is not None:
                return int(holder)
        return None if is_over else _Free(number)

    def release(self, numbers: Sequence[int]) -> None:
        """Give up sessions, those of them that this replica holds, so that others may take them at
        once. What was asked to be written of them has to be written before. Raises
        psycopg.Error."""
        for some in _slices(numbers):
            self._read(_THESE, {"me": self.replica_id, "numbers": some})

    def holders_of(self, numbers: Sequence[int]) -> list[HeldBy]:
        """Return which of these sessions other replicas hold, as `take` says it. Raises
        psycopg.Error."""
        query = (
            "SELECT number, holder, address FROM sessions JOIN replicas ON replicas.id = holder"
            " WHERE number = ANY(%(numbers)s::bigint[]) AND sessions.expires > 0"
            " AND holder <> %(me)s AND replicas.expires > clock_timestamp()"
        )
        found = self._read(query, {"numbers": list(numbers), "me": self.replica_id})
        return [HeldBy(*each) for each in found]

    def ask_for(self, held: Sequence[HeldBy]) -> None:
        """Ask whoever holds sessions to give them up. Raises psycopg.Error."""
        query = (
            "SELECT pg_notify(channel, number)"
            " FROM unnest(%s::text[], %s::text[]) AS asked (channel, number)"
        )
        channels = [channel_of(each.replica_id) for each in held]
        self._read(query, (channels, [str(each.number) for each in held]))

    def asked(self, timeout_s: float) -> list[int]:
        """Return which sessions others ask of this replica, once there are any or that time is
        over. What was asked while no connection was there is lost: others ask again. Raises
        LeaseLost, psycopg.Error."""
        return self._listening().asked(timeout_s)

    def _over_own(self, ask: Callable[[PostgresConnection], _T], *waits_s: float) -> _T:
        """Ask over the connection of the lease, again over a new one where that has failed, which
        nobody knows of one that was idle. What is asked for may be done twice. `waits_s`: within
        what time the first one has to have answered, and the last."""
        begun_s = time.monotonic()
        try:
            with self._own.lent() as connection, connection.answering(begun_s + waits_s[0]):
                return ask(connection)
        except psycopg.OperationalError:
            with self._own.lent() as connection, connection.answering(begun_s + waits_s[-1]):
                return ask(connection)

    def _listening(self) -> Notifications:
        if self._listener is None:
            raise LeaseLost("this replica has not joined")
        return self._listener

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None


def _bury(replica_id: int, connection: PostgresConnection) -> None:
    """Delete a replica whose lease has ended, once its commit is over that is under way."""
    query = "DELETE FROM replicas WHERE id = %s AND expires <= clock_timestamp()"
    connection.execute(query, (replica_id,))


def _delete_replica(replica_id: int, connection: PostgresConnection) -> None:
    connection.execute("DELETE FROM replicas WHERE id = %s", (replica_id,))


def _slices(numbers: Sequence[int]) -> list[list[int]]:
    return [
        list(numbers[start : start + RELEASED_AT_ONCE])
        for start in range(0, len(numbers), RELEASED_AT_ONCE)
    ]
