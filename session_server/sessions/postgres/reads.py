"""Every statement that reads a store in PostgreSQL."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg_pool import ConnectionPool

from session_server.sessions.postgres.connections import (
    ANSWER_WAIT_S,
    MAX_READERS,
    PostgresConnection,
)
from session_server.sessions.postgres.failures import is_passing
from session_server.sessions.postgres.holdings import OF_ALL, OF_OWNERS
from session_server.sessions.postgres.schema import COLUMNS
from session_server.sessions.store.pieces import first_rows
from session_server.sessions.store.records import Holding, Parts, RecordRow, SessionRow
from session_server.sessions.store.schema import RECORD_COLUMNS
from session_server.sessions.store.survey import (
    PLACES,
    STATE,
    SurveyAnswer,
    SurveyQuestion,
    owners_with,
)

NO_REPLICA: Final = 0
"""The id of one that has not joined: no replica has it."""

IS_ANOTHERS: Final = (
    "EXISTS (SELECT FROM replicas WHERE replicas.id = sessions.holder"
    " AND replicas.id <> %(me)s AND replicas.expires > clock_timestamp())"
)
"""What is true of a session that another live replica holds."""

_IS_NO_OTHERS: Final = (
    f"coalesce(holder, {NO_REPLICA}) NOT IN"  # noqa: S608 - our own words
    " (SELECT id FROM replicas WHERE id <> %(me)s AND expires > clock_timestamp())"
)
"""The contrary, for a statement that passes over many: replicas are read once, not for each."""

_LIVE: Final = "FROM replicas WHERE expires > clock_timestamp()"
_IS_OURS_TO_END: Final = (
    "(holder IS NOT DISTINCT FROM %(me)s OR (hashint8(number) & 2147483647)"
    f" %% (SELECT greatest(count(*), 1) {_LIVE}) = (SELECT count(*) {_LIVE} AND id < %(me)s))"
)
"""What is true of a session that no other live replica holds: of those that nobody holds each of
the live ones has its share, which no other one reads."""

_SURVEYED: Final = (
    "expires >= %(now_s)s AND number <> ALL(%(without)s::bigint[])"
    f" AND (%(text)s::text = '' OR strpos('{STATE}', %(text)s) > 0 OR strpos(id, %(text)s) > 0"
    " OR owner = ANY(%(owners)s::text[]))"
)

_NO_TEXT: Final = re.compile("[\0\ud800-\udfff]")
"""What a column of texts refuses."""

_FoundT = TypeVar("_FoundT")
Values = Sequence[Any] | dict[str, Any]


def is_name(*names: str) -> bool:
    """Return whether there may be something of these names: clients ask for any text, and nothing
    is there of one that PostgreSQL refuses."""
    return not any(map(_NO_TEXT.search, names))


class PostgresReads:
    """Read the rows of a store as of the last commit, from any thread. Each call raises
    psycopg.Error, and waits no longer than `connections` says."""

    replica_id = NO_REPLICA

    def __init__(self, pool: ConnectionPool[PostgresConnection]) -> None:
        self._pool = pool

    def find(self, owner_id: str, session_id: str) -> SessionRow | None:
        """Return a session as of the last commit."""
        if not is_name(session_id):
            return None
        rows = self._rows("owner = %s AND id = %s", (owner_id, session_id))
        return next(iter(rows), None)

    def numbered(self, number: int) -> SessionRow | None:
        """Return the session of a number as of the last commit."""
        return next(iter(self._rows("number = %s", (number,))), None)

    def page(self, owner_id: str, *, after: int, now_s: float, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions of an owner that have a higher number and have not expired,
        in order."""
        condition = "owner = %s AND number > %s AND expires >= %s ORDER BY number LIMIT %s"
        return self._rows(condition, (owner_id, after, now_s, limit))

    def holdings(self) -> list[Holding]:
        """Return what each owner has; expired sessions are counted among the others."""
        return [Holding(*found) for found in self._read(OF_ALL)]

    def holdings_of(self, owner_ids: Sequence[str]) -> list[Holding]:
        """Return what some owners have."""
        return [Holding(*found) for found in self._read(OF_OWNERS, {"owners": list(owner_ids)})]

    def expired(self, after: tuple[float, int], until_s: float, *, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions that expire before a time, behind one that is given by when
        it expires and its number; without those that another live replica holds, which knows better
        whether they are used, and without its share of those that nobody holds."""
        condition = (
            "expires < %(until_s)s AND (expires, number) > (%(expires_s)s, %(number)s)"
            f" AND {_IS_NO_OTHERS} AND {_IS_OURS_TO_END}"
            " ORDER BY expires, number LIMIT %(limit)s"
        )
        expires_s, number = after
        values = {"until_s": until_s, "expires_s": expires_s, "number": number, "limit": limit}
        return self._rows(condition, values | {"me": self.replica_id})

    def num_expiring(self, since_s: float, until_s: float, *, limit: int) -> int:
        """Return how many sessions expire in this time, counted up to `limit`."""
        query = (
            "SELECT count(*) FROM"
            " (SELECT FROM sessions WHERE expires >= %s AND expires < %s LIMIT %s) AS expiring"
        )
        return int(self._read(query, (since_s, until_s, limit))[0][0])

    def noted_s(self) -> float | None:
        """Return None: the database has a clock, which goes on while no server runs. See `join`."""
        return None

    def entries(
        self, number: int, *, start: int = 0, limit: int = -1, max_bytes: int | None = None
    ) -> list[bytes]:
        """Return the entries of a session from a position on, in order; up to `limit`, -1: all, and
        none behind one with which they have `max_bytes`."""
        condition = "entries WHERE session = %(of)s AND position >= %(start)s"
        rows = self._bounded("entry", condition, {"of": number, "start": start}, (limit, max_bytes))
        return [entry for _, entry in rows]

    def last_number(self) -> int:
        """Return the highest number of a session, 0 without one."""
        return int(self._read("SELECT coalesce(max(number), 0) FROM sessions")[0][0])

    def census(self, now_s: float) -> tuple[int, int]:
        """Return how many sessions are open, and how many have expired, without retired ones."""
        query = (
            "SELECT count(*) FILTER (WHERE expires >= %(now_s)s),"
            " count(*) FILTER (WHERE expires < %(now_s)s) FROM sessions WHERE expires > 0"
        )
        ((num_open, num_expired),) = self._read(query, {"now_s": now_s})
        return int(num_open), int(num_expired)

    def records(self) -> list[RecordRow]:
        """Return all records, that first which was not written for longest."""
        return self._record_rows("ORDER BY used")

    def find_record(self, owner_id: str, record_id: str) -> RecordRow | None:
        """Return a record as of the last commit."""
        if not is_name(record_id):
            return None
        rows = self._record_rows("WHERE owner = %s AND id = %s", owner_id, record_id)
        return next(iter(rows), None)

    def record_made_in(
        self, owner_id: str, session_id: str, kind: str, *, beside: str
    ) -> RecordRow | None:
        """Return a record of a kind that was made in a session, other than one of an id, as of the
        last commit; None if there is none."""
        if not is_name(session_id, beside):
            return None
        condition = "WHERE owner = %s AND session = %s AND kind = %s AND id <> %s LIMIT 1"
        rows = self._record_rows(condition, owner_id, session_id, kind, beside)
        return next(iter(rows), None)

    def parts(
        self, number: int, *, after: int = -1, limit: int = -1, max_bytes: int | None = None
    ) -> Parts:
        """Return the parts of a record behind a position, as `entries` does those of a session."""
        condition = "parts WHERE record = %(of)s AND position > %(after)s"
        return self._bounded("part", condition, {"of": number, "after": after}, (limit, max_bytes))

    def survey(self, question: SurveyQuestion) -> SurveyAnswer:
        """Look through all sessions for a page of them. O(sessions)."""
        if not is_name(question.text):
            return SurveyAnswer([], 0)
        owners = owners_with(
            question,
            lambda: [owner for (owner,) in self._read("SELECT DISTINCT owner FROM sessions")],
        )
        values: dict[str, Any] = {
            "now_s": question.now_s,
            "text": question.text,
            "without": list(question.without),
            "owners": owners,
            "limit": question.limit,
        }
        counted = f"SELECT count(*) FROM sessions WHERE {_SURVEYED}"  # noqa: S608 - our own words
        num_matching = int(self._read(counted, values)[0][0])
        place = f"({PLACES[question.sort]})::double precision"
        query = f"SELECT {place}, {COLUMNS} FROM sessions WHERE {_SURVEYED}"  # noqa: S608
        if question.after is not None:
            query += f" AND ({place}, number) > (%(place)s, %(number)s)"
            values |= dict(zip(("place", "number"), question.after, strict=True))
        query += f" ORDER BY {place}, number LIMIT %(limit)s"
        found = [(where, SessionRow(*row)) for where, *row in self._read(query, values)]
        return SurveyAnswer(found, num_matching)

    def _bounded(
        self, column: str, condition: str, values: dict[str, int], most: tuple[int, int | None]
    ) -> list[tuple[int, bytes]]:
        """Return positions and a column of some rows, up to the one with which they have so many
        bytes: what is behind that one is not sent."""
        limit, max_bytes = most
        # The length of a value is known without its bytes.
        query = (
            f"SELECT position, {column} FROM (SELECT position, {column},"  # noqa: S608
            f" sum(octet_length({column})) OVER (ORDER BY position) - octet_length({column})"
            f" AS before FROM {condition} ORDER BY position LIMIT %(limit)s) AS bounded"
            " WHERE before < %(max_bytes)s OR %(max_bytes)s IS NULL ORDER BY position"
        ).replace("%(max_bytes)s", "%(max_bytes)s::bigint")
        bounds = {
            "limit": None if limit < 0 else limit,
            "max_bytes": None if max_bytes is None else max(1, max_bytes),
        }
        return first_rows(self._read(query, values | bounds), 1, max_bytes)

    def _rows(self, condition: str, values: Values) -> list[SessionRow]:
        query = f"SELECT {COLUMNS} FROM sessions WHERE {condition}"  # noqa: S608
        return [SessionRow(*columns) for columns in self._read(query, values)]

    def _record_rows(self, condition: str, *values: str) -> list[RecordRow]:
        query = f"SELECT {RECORD_COLUMNS} FROM records {condition}"  # noqa: S608 - our own words
        return [RecordRow(*columns) for columns in self._read(query, values)]

    def _read(self, query: str, values: Values = ()) -> list[tuple[Any, ...]]:
        return self._over_pool(
            lambda connection: connection.execute(query, values, binary=True).fetchall()
        )

    def _over_pool(self, ask: Callable[[PostgresConnection], _FoundT]) -> _FoundT:
        """Ask over a connection of the pool, again over another where it was broken: nobody knows
        that of one that was idle. Also again where it was undone for another transaction. What is
        asked for may be done twice."""
        until_s = time.monotonic() + ANSWER_WAIT_S
        for num_left in reversed(range(MAX_READERS + 1)):
            with self._pool.connection() as connection:
                try:
                    with connection.answering(until_s):
                        return ask(connection)
                except psycopg.OperationalError as error:
                    is_late = time.monotonic() >= until_s
                    may_pass = connection.closed or is_passing(error)
                    if is_late or not (num_left and may_pass):
                        raise
        raise AssertionError("the last attempt neither returned nor raised")
