"""Keep what each owner has, so that nobody has to look at all of it.

What a transaction changes is added up, and written with its commit to rows that only replicas of
one slot write: commits of several replicas do not wait for each other. What an owner has is the sum
of its rows, of which one may be below 0 where another is above.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple

from psycopg import ClientCursor

from session_server.sessions.postgres.connections import PostgresConnection
from session_server.sessions.store.records import CONVERSATIONS, RESPONSES

TABLE: Final = """
CREATE TABLE holdings (
    owner text COLLATE "C" NOT NULL,
    slot int NOT NULL,
    num_sessions bigint NOT NULL,
    num_bytes bigint NOT NULL,
    num_retired bigint NOT NULL,
    num_record_bytes bigint NOT NULL,
    PRIMARY KEY (owner, slot)
);
"""
KINDS: Final = """
ALTER TABLE holdings ADD COLUMN IF NOT EXISTS num_conversation_bytes bigint NOT NULL DEFAULT 0;
CREATE INDEX IF NOT EXISTS records_by_use ON records (kind, used);
CREATE INDEX IF NOT EXISTS records_of_owner_by_use ON records (owner, kind, used);
"""
"""Records give way by kinds: of their bytes those of conversations count apart."""

EVICTED_AT_ONCE: Final = 32
"""Records of a kind that one statement deletes: a long one has many parts."""

_NUMBERS: Final = (
    "num_sessions",
    "num_bytes",
    "num_retired",
    "num_record_bytes",
    "num_conversation_bytes",
)
_NO_SLOT: Final = -1
"""The slot of what `set_right` writes: no replica has it."""

_LISTED: Final = ", ".join(_NUMBERS)
_NEGATED: Final = ", ".join(f"-{name}" for name in _NUMBERS)
_SUMMED: Final = ", ".join(f"sum({name})::bigint AS {name}" for name in _NUMBERS)
_ARRAYS: Final = ", ".join(f"%({name})s::bigint[]" for name in _NUMBERS)
_IS_NOTHING: Final = " AND ".join(f"{name} = 0" for name in _NUMBERS)
_ADD: Final = "ON CONFLICT (owner, slot) DO UPDATE SET " + ", ".join(
    f"{name} = holdings.{name} + EXCLUDED.{name}" for name in _NUMBERS
)

_OF_RECORDS: Final = (
    "SELECT owner, 0 AS num_sessions, 0 AS num_bytes, 0 AS num_retired,"
    " sum(num_bytes) AS num_record_bytes,"
    f" coalesce(sum(num_bytes) FILTER (WHERE kind = '{CONVERSATIONS}'), 0)"
    " AS num_conversation_bytes"
)
SCAN: Final = (
    "SELECT owner, count(*) FILTER (WHERE expires > 0) AS num_sessions,"  # noqa: S608
    " sum(num_bytes + octet_length(settings)) AS num_bytes,"
    " coalesce(sum(num_bytes) FILTER (WHERE expires = 0), 0) AS num_retired,"
    " 0 AS num_record_bytes, 0 AS num_conversation_bytes FROM sessions GROUP BY owner"
    f" UNION ALL {_OF_RECORDS} FROM records GROUP BY owner"
)
"""What owners have by all sessions and records: two rows for each."""

_COUNT: Final = (
    f"INSERT INTO holdings SELECT owner, {_NO_SLOT}, {_LISTED} FROM ("  # noqa: S608 - our own words
    f"SELECT owner, {_SUMMED} FROM ({SCAN} UNION ALL SELECT owner, {_NEGATED} FROM holdings)"
    f" AS each GROUP BY owner) AS missing WHERE NOT ({_IS_NOTHING}) {_ADD}"
)
_FOLD: Final = (
    "WITH folded AS (DELETE FROM holdings WHERE (owner, slot) IN"  # noqa: S608 - our own words
    f" (SELECT owner, slot FROM holdings WHERE slot <> {_NO_SLOT} FOR UPDATE SKIP LOCKED)"
    f" RETURNING *) INSERT INTO holdings SELECT owner, {_NO_SLOT}, {_SUMMED} FROM folded"
    f" GROUP BY owner {_ADD}"
)
_CHANGE: Final = (
    f"INSERT INTO holdings SELECT owner, %(slot)s, {_LISTED} FROM"  # noqa: S608 - our own words
    f" unnest(%(owner)s::text[], {_ARRAYS})"
    f" AS changed (owner, {_LISTED}) {_ADD}; DELETE FROM holdings"
    f" WHERE owner = ANY(%(owner)s::text[]) AND slot = %(slot)s AND {_IS_NOTHING}"
)
_HELD: Final = "owner, num_sessions, num_bytes + num_record_bytes, num_retired"
OF_OWNERS: Final = (
    f"SELECT {_HELD} FROM (SELECT owner, {_SUMMED} FROM holdings"  # noqa: S608 - our own words
    " WHERE owner = ANY(%(owners)s) GROUP BY owner) AS each"
)
OF_ALL: Final = (
    f"SELECT {_HELD} FROM (SELECT owner, {_SUMMED} FROM holdings GROUP BY owner)"  # noqa: S608
    f" AS each WHERE NOT ({_IS_NOTHING})"
)

_EVICT: Final = (
    "WITH full_kinds AS (SELECT kind, num_bytes - %(most)s AS surplus FROM"  # noqa: S608
    " (SELECT sum(num_record_bytes) AS num_all, sum(num_conversation_bytes) AS num_said"
    " FROM holdings WHERE {whose}) AS held, LATERAL"
    f" (VALUES ('{RESPONSES}', num_all - num_said), ('{CONVERSATIONS}', num_said))"
    " AS each (kind, num_bytes) WHERE num_bytes > %(most)s),"
    " oldest AS (SELECT number, used FROM full_kinds, LATERAL"
    " (SELECT number, used, sum(num_bytes) OVER (ORDER BY used, number) - num_bytes AS before"
    " FROM (SELECT * FROM records WHERE {whose} AND records.kind = full_kinds.kind"
    " ORDER BY used, number LIMIT %(limit)s) AS each) AS first WHERE before < surplus),"
    # One that was written again meanwhile is not the oldest any more.
    " gone AS (DELETE FROM records USING oldest WHERE records.number = oldest.number"
    " AND records.used = oldest.used RETURNING owner, kind, num_bytes),"
    f" uncounted AS (INSERT INTO holdings SELECT owner, %(slot)s, {_NEGATED} FROM"
    f" ({_OF_RECORDS} FROM gone GROUP BY owner) AS each {_ADD})"
    " SELECT owner, sum(num_bytes)::bigint FROM gone GROUP BY owner"
)
EVICT_OF_OWNER: Final = _EVICT.format(whose="owner = %(owner)s")
EVICT_OF_ALL: Final = _EVICT.format(
    # One replica has to look at what all have.
    whose="%(me)s = (SELECT min(id) FROM replicas WHERE role <> 'prefill'"
    " AND expires > clock_timestamp())"
)
"""What deletes the records that were written longest ago, while those of a kind have too much. One
statement, so that two replicas do not delete twice as many."""


class SessionSize(NamedTuple):
    """Say what counts of a session: when it expires (0: it is retired), the bytes of its entries,
    and of its settings."""

    expires_s: float
    num_bytes: int
    num_row_bytes: int


class HoldingChanges:
    """Add up what one transaction changes of what owners have."""

    def __init__(self) -> None:
        self._changes = {name: Counter[str]() for name in _NUMBERS}

    def change(self, owner_id: str, before: SessionSize | None, after: SessionSize | None) -> None:
        """Count a session as it is now in place of what it was; None is one that is not there."""
        for size, sign in ((before, -1), (after, 1)):
            if size is not None:
                num_retired = size.num_bytes if size.expires_s == 0 else 0
                self._changes["num_sessions"][owner_id] += sign * (size.expires_s > 0)
                self._changes["num_bytes"][owner_id] += sign * (size.num_bytes + size.num_row_bytes)
                self._changes["num_retired"][owner_id] += sign * num_retired

    def add_record_bytes(self, owner_id: str, kind: str, num_bytes: int) -> None:
        """Count bytes of records of a kind that an owner has more, or less."""
        self._changes["num_record_bytes"][owner_id] += num_bytes
        if kind == CONVERSATIONS:
            self._changes["num_conversation_bytes"][owner_id] += num_bytes

    def commit(self, connection: PostgresConnection, slot: int) -> None:
        """Write what has changed, and commit with it, in one message. Raises psycopg.Error."""
        owners = set[str]().union(*self._changes.values())
        changed = sorted(
            owner for owner in owners if any(each[owner] for each in self._changes.values())
        )
        if not changed:
            connection.execute("COMMIT")
            return
        values: dict[str, Any] = {"slot": slot, "owner": changed}
        for name, counts in self._changes.items():
            values[name] = [counts[owner] for owner in changed]
        ClientCursor(connection).execute(f"{_CHANGE}; COMMIT", values)


def set_right(connection: PostgresConnection) -> int:
    """Count anew what owners have, and add what was not counted, or subtract it: a server of an
    earlier version counts nothing. Return for how many owners that was so. Looks at all sessions,
    in the snapshot of one statement, and nobody waits for it; one transaction at a time may call
    it. Raises psycopg.Error."""
    num_wrong = connection.execute(_COUNT).rowcount
    # An owner that has nothing left may have rows that cancel each other.
    connection.execute(_FOLD)
    connection.execute(f"DELETE FROM holdings WHERE slot = {_NO_SLOT} AND {_IS_NOTHING}")  # noqa: S608
    return num_wrong
