"""Every statement that reads a store."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from session_server.sessions.store.clock import EARLIEST_S
from session_server.sessions.store.pieces import first_rows
from session_server.sessions.store.records import LAST_S, Holding, Parts, RecordRow, SessionRow
from session_server.sessions.store.schema import COLUMNS, RECORD_COLUMNS

_PAGE_ROWS: Final = 256

_EACH_OWNER: Final = (
    "SELECT min(owner) FROM sessions UNION ALL SELECT (SELECT min(owner) FROM sessions"
    " WHERE owner > owners.owner) FROM owners WHERE owner IS NOT NULL"
)
_BEHIND: Final = "number > ? ORDER BY number LIMIT ?"
_RowT = TypeVar("_RowT", SessionRow, RecordRow)


class Reads:
    """Read the rows of a store as of the last commit. Each call raises sqlite3.Error."""

    _reader: sqlite3.Connection
    _columns = COLUMNS

    def find(self, owner_id: str, session_id: str) -> SessionRow | None:
        """Return a session as of the last commit."""
        rows = self._rows("owner = ? AND id = ?", (owner_id, session_id))
        return next(iter(rows), None)

    def numbered(self, number: int) -> SessionRow | None:
        """Return the session of a number as of the last commit."""
        return next(iter(self._rows("number = ?", (number,))), None)

    def page(self, owner_id: str, *, after: int, now_s: float, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions of an owner that have a higher number and have not expired,
        in order."""
        condition = "owner = ? AND number > ? AND expires >= ? ORDER BY number LIMIT ?"
        return self._rows(condition, (owner_id, after, now_s, limit))

    def holdings(self) -> list[Holding]:
        """Return what each owner has; expired sessions are counted among the others."""
        query = (
            "SELECT owner, sum(expires > 0), sum(num_bytes + length(settings)),"
            " sum(iif(expires = 0, num_bytes, 0)) FROM sessions GROUP BY owner"
        )
        return [Holding(*found) for found in self._reader.execute(query)]

    def expired(self, after: tuple[float, int], until_s: float, *, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions that expire before a time, behind one that is given by when
        it expires and its number."""
        condition = "expires < ? AND (expires, number) > (?, ?) ORDER BY expires, number LIMIT ?"
        return self._rows(condition, (until_s, *after, limit))

    def num_expiring(self, since_s: float, until_s: float, *, limit: int) -> int:
        """Return how many sessions expire in this time, counted up to `limit`."""
        query = (
            "SELECT count(*) FROM"
            " (SELECT 1 FROM sessions WHERE expires >= ? AND expires < ? LIMIT ?)"
        )
        return int(self._reader.execute(query, (since_s, until_s, limit)).fetchone()[0])

    def noted_s(self) -> float | None:
        """Return the time that a server has noted last; None if none has."""
        query = "SELECT value FROM facts WHERE name = 'time'"
        for (value,) in self._reader.execute(query):
            with contextlib.suppress(ValueError):
                noted_s = float(value)
                if EARLIEST_S <= noted_s < LAST_S:
                    return noted_s
        return None

    def entries(
        self, number: int, *, start: int = 0, limit: int = -1, max_bytes: int | None = None
    ) -> list[bytes]:
        """Return the entries of a session from a position on, in order; up to `limit`, -1: all, and
        none behind one with which they have `max_bytes`."""
        rows = self._reader.execute(
            "SELECT entry FROM entries WHERE session = ? AND position >= ?"
            " ORDER BY position LIMIT ?",
            (number, start, limit),
        )
        return [entry for (entry,) in first_rows(rows, 0, max_bytes)]

    def named(
        self, owner_id: str | None, first_id: str, last_id: str, *, limit: int
    ) -> list[SessionRow]:
        """Return up to `limit` sessions of an owner, or of everybody, whose ids lie between two, in
        order. Looks at one session of each owner, and at those."""
        owners = "VALUES (:owner)" if owner_id is not None else _EACH_OWNER
        query = (
            f"WITH RECURSIVE owners (owner) AS ({owners}) SELECT {COLUMNS} FROM owners"  # noqa: S608
            " CROSS JOIN sessions USING (owner) WHERE id BETWEEN :first AND :last"
            " AND expires > 0 LIMIT :limit"
        )
        values = {"owner": owner_id, "first": first_id, "last": last_id, "limit": limit}
        return [SessionRow(*columns) for columns in self._reader.execute(query, values)]

    def walk(self, owner_id: str | None, *, after: int = 0) -> Iterator[SessionRow]:
        """Yield all sessions of an owner, or of everybody, in order, without retired ones, behind a
        number."""
        while True:
            condition = (
                "number > ? AND owner = ifnull(?, owner) AND expires > 0 ORDER BY number LIMIT ?"
            )
            rows = self._rows(condition, (after, owner_id, _PAGE_ROWS))
            yield from rows
            if len(rows) < _PAGE_ROWS:
                return
            after = rows[-1].number

    def slices(self) -> Iterator[list[SessionRow]]:
        """Yield all sessions, some at a time; what is read while those are looked at is of the same
        commit."""
        return self._slices(lambda after: self._rows(_BEHIND, (after, _PAGE_ROWS)))

    def record_slices(self) -> Iterator[list[RecordRow]]:
        """Yield all records, as `slices` does sessions."""
        return self._slices(lambda after: self._record_rows(f"WHERE {_BEHIND}", after, _PAGE_ROWS))

    def _slices(self, read: Callable[[int], list[_RowT]]) -> Iterator[list[_RowT]]:
        after, rows = 0, list[_RowT]()
        while not after or len(rows) == _PAGE_ROWS:
            self._reader.execute("BEGIN")
            try:
                rows = read(after)
                yield rows
            finally:
                self._reader.execute("COMMIT")
            after = rows[-1].number if rows else after + 1

    def faults(self, most: int) -> list[str]:
        """Return what SQLite finds wrong with its pages, tables and indexes, up to `most` faults.
        Reads all of the database."""
        found = [said for (said,) in self._reader.execute(f"PRAGMA integrity_check({most})")]
        return [] if found == ["ok"] else found

    def strays(self) -> Counter[str]:
        """Return how many rows of each table refer to one that is not there. Reads all of the
        database."""
        return Counter(table for table, *_ in self._reader.execute("PRAGMA foreign_key_check"))

    def last_number(self) -> int:
        """Return the highest number of a session, 0 without one."""
        query = "SELECT coalesce(max(number), 0) FROM sessions"
        return int(self._reader.execute(query).fetchone()[0])

    def census(self, now_s: float) -> tuple[int, int]:
        """Return how many sessions are open, and how many have expired, without retired ones."""
        query = (
            "SELECT count(*) FILTER (WHERE expires >= :now_s),"
            " count(*) FILTER (WHERE expires < :now_s) FROM sessions WHERE expires > 0"
        )
        num_open, num_expired = self._reader.execute(query, {"now_s": now_s}).fetchone()
        return int(num_open), int(num_expired)

    def records(self) -> list[RecordRow]:
        """Return all records, that first which was not written for longest."""
        return self._record_rows("ORDER BY used")

    def find_record(self, owner_id: str, record_id: str) -> RecordRow | None:
        """Return a record as of the last commit."""
        rows = self._record_rows("WHERE owner = ? AND id = ?", owner_id, record_id)
        return next(iter(rows), None)

    def parts(
        self, number: int, *, after: int = -1, limit: int = -1, max_bytes: int | None = None
    ) -> Parts:
        """Return the parts of a record behind a position, as `entries` does those of a session."""
        rows = self._reader.execute(
            "SELECT position, part FROM parts WHERE record = ? AND position > ?"
            " ORDER BY position LIMIT ?",
            (number, after, limit),
        )
        return first_rows(rows, 1, max_bytes)

    def _rows(self, condition: str, values: Sequence[Any]) -> list[SessionRow]:
        query = f"SELECT {self._columns} FROM sessions WHERE {condition}"  # noqa: S608
        return [SessionRow(*columns) for columns in self._reader.execute(query, values)]

    def _record_rows(self, condition: str, *values: int | str) -> list[RecordRow]:
        query = f"SELECT {RECORD_COLUMNS} FROM records {condition}"  # noqa: S608 - our own words
        return [RecordRow(*columns) for columns in self._reader.execute(query, values)]
