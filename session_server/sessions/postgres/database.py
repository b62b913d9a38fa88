"""The store in PostgreSQL: every statement that writes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import psycopg
from msgspec import structs
from psycopg import errors
from psycopg_pool import PoolTimeout

from session_server.sessions.postgres.connections import (
    ANSWER_WAIT_S,
    COMMIT_WAIT_S,
    connect,
    open_pool,
    shown,
    whole,
)
from session_server.sessions.postgres.failures import (
    explain,
    is_passing,
    is_unavailable,
    refusal,
)
from session_server.sessions.postgres.holdings import (
    EVICT_OF_ALL,
    EVICT_OF_OWNER,
    EVICTED_AT_ONCE,
    HoldingChanges,
    SessionSize,
)
from session_server.sessions.postgres.leases import IS_OVER, LEASE, Leases
from session_server.sessions.postgres.reads import IS_ANOTHERS
from session_server.sessions.postgres.schema import migrate
from session_server.sessions.store.database import Behind, Durability
from session_server.sessions.store.deleted_rows import (
    DELETED_BYTES,
    DELETED_ENTRIES,
    RENAMED,
    Freed,
)
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.ownership import LeaseLost, Moved, NameTaken
from session_server.sessions.store.records import Parts, RecordRow, SessionRow

_logger: Final = logging.getLogger("session_server.store")

_BEGIN_TO_DELETE: Final = f"{RENAMED}, epoch = epoch + 1"
"""What begins a deletion: nothing that its holder may still have to write changes it."""

_BEFORE: Final = (
    "before AS (SELECT expires AS expires_then, num_bytes AS num_then, octet_length(settings)"
    " FROM sessions WHERE number = %(number)s)"
)
"""What a session was in the snapshot of the statement that changes it."""

_OPEN_SESSION: Final = (
    "INSERT INTO sessions SELECT %(number)s, %(owner)s, %(id)s, %(model)s, %(expires)s,"
    " %(settings)s, %(num_tokens)s, %(num_turns)s, %(num_uses)s, %(num_entries)s, %(num_bytes)s,"
    # One that was taken was there: where it is not, somebody has deleted it.
    " %(me)s, %(epoch)s WHERE %(epoch)s <= 1 ON CONFLICT (number) DO NOTHING"
)
_REPLACE_SESSION: Final = (
    f"WITH {_BEFORE}"  # noqa: S608 - our own words
    " UPDATE sessions SET model = %(model)s, expires = %(expires)s, settings = %(settings)s,"
    " num_tokens = %(num_tokens)s, num_turns = %(num_turns)s, num_uses = %(num_uses)s,"
    " num_entries = %(num_entries)s, num_bytes = %(num_bytes)s FROM before"
    " WHERE (number, owner, id, holder, epoch)"
    " = (%(number)s, %(owner)s, %(id)s, %(me)s, %(epoch)s) RETURNING before.*"
)
_CHANGE_SESSION: Final = (
    f"WITH {_BEFORE}, changed AS (UPDATE sessions SET expires = %(expires)s,"  # noqa: S608
    " settings = %(settings)s,"
    " num_tokens = %(num_tokens)s, num_turns = %(num_turns)s, num_uses = %(num_uses)s,"
    " num_entries = num_entries + %(num_added)s, num_bytes = num_bytes + %(num_bytes)s"
    " WHERE number = %(number)s AND num_entries = %(num_entries)s AND holder = %(me)s"
    " AND epoch = %(epoch)s RETURNING number), added AS (INSERT INTO entries"
    " SELECT number, %(num_entries)s + place - 1, entry, %(epoch)s FROM changed,"
    " unnest(%(entries)s::bytea[]) WITH ORDINALITY AS given (entry, place))"
    " SELECT before.* FROM changed, before"
)
_PUT_ENTRIES: Final = (
    "INSERT INTO entries SELECT %s, place - 1, entry, %s"
    " FROM unnest(%s::bytea[]) WITH ORDINALITY AS given (entry, place)"
)


class PostgresDatabase(Leases):
    """Open a store in a database, whose tables are made if there are none. One thread calls the
    verbs inside `transaction`, once the replica has joined; any thread the reads and the leases.

    `secret`: random bytes that live as long as the store.
    """

    read_errors: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, PoolTimeout, OSError)

    has_deleted = False
    """Nothing has to be erased behind a deletion: VACUUM of PostgreSQL does that."""

    directory = None

    def __init__(self, url: str, *, durability: Durability = "turn") -> None:
        """Connect to a database at a URL (`postgresql://user@host:5432/name`, or a connection
        string of libpq), and bring its tables to this version.

        Raises:
            StoreUnusable: it cannot be reached or used, or was written by a later version.
        """
        try:
            conninfo, place = whole(url), shown(url)
        except psycopg.ProgrammingError:  # its text has all of the URL
            raise StoreUnusable(
                "--store: this is no URL of PostgreSQL: postgresql://user:password@host:5432/name"
            ) from None
        self._is_synced = durability == "turn"
        self._changes = HoldingChanges()
        try:
            self._writer = connect(conninfo, is_synced=self._is_synced)
            try:
                self.secret = migrate(self._writer, place)
                is_kept = self._execute("SELECT current_setting('fsync')", ()).fetchone()
            except BaseException:
                self._writer.close()
                raise
        except (psycopg.Error, OSError) as error:
            raise refusal(place, error) from error
        super().__init__(open_pool(conninfo), conninfo, place)
        if self._is_synced and is_kept != ("on",):
            told = "--store %s: fsync is off there, so a crash of its machine may lose every turn"
            _logger.warning(told, place)

    @property
    def place(self) -> str:
        """Return the URL without a password."""
        return self._place

    def is_unavailable(self, error: Exception) -> bool:
        """Return whether PostgreSQL is at fault, or the way there."""
        return is_unavailable(error)

    def fails_all(self, error: Exception) -> bool:
        """Return whether each write would fail as this one did, and not for what it was."""
        return is_unavailable(error) and not is_passing(error)

    def is_passing(self, error: Exception) -> bool:
        """Return whether PostgreSQL has undone a transaction in favor of another one."""
        return is_passing(error)

    def explain(self, error: Exception) -> str:
        """Return what an error says, and what to do where that is known."""
        return explain(error)

    def close(self) -> None:
        """Close all connections. Whoever holds sessions calls `leave` before."""
        self._stop_listening()
        self._own.close()
        self._writer.close()
        self._pool.close()

    def shorten_log(self, *, erases: bool) -> None:
        """Do nothing: PostgreSQL sees to its own log."""

    # -- verbs, inside a transaction

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what happens in the block, all or nothing. Where the connection breaks while it
        commits nobody knows whether it has: to put all of it again is right in both cases. Raises
        LeaseLost, Moved, NameTaken, Behind, psycopg.Error."""
        self._begin()
        self._changes = HoldingChanges()
        try:
            with self._writer.answering(time.monotonic() + COMMIT_WAIT_S):
                yield
                self._commit()
        except BaseException:
            self._roll_back()
            raise

    def _begin(self) -> None:
        """Begin a transaction, for whose time nobody takes what this replica holds."""
        # One that has broken is noticed now, when nothing is written yet.
        try:
            is_held = self._try_to_begin()
        except psycopg.OperationalError:
            if not self._writer.closed:
                self._roll_back()
                raise
            self._writer = connect(self._conninfo, is_synced=self._is_synced)
            is_held = self._try_to_begin()
        if not is_held:
            self._roll_back()
            raise LeaseLost(f"the lease of replica {self.replica_id} is over")

    def _try_to_begin(self) -> bool:
        """Begin, and return whether this replica has its lease."""
        # In one message, which therefore has the number in its text.
        with self._writer.answering(time.monotonic() + ANSWER_WAIT_S):
            cursor = self._writer.execute(f"BEGIN; {LEASE % self.replica_id}")
        cursor.nextset()
        return cursor.rowcount == 1

    def _commit(self) -> None:
        warnings = list[str]()

        def on_notice(notice: errors.Diagnostic) -> None:
            if notice.severity_nonlocalized == "WARNING":
                warnings.append(notice.message_primary or "")

        self._writer.add_notice_handler(on_notice)
        try:
            self._changes.commit(self._writer, self.slot)
        finally:
            self._writer.remove_notice_handler(on_notice)
        if warnings and self._is_synced:
            # A standby has not answered in time. The commit is in this server, and only there.
            raise errors.OperationalError("; ".join(warnings))

    def _roll_back(self) -> None:
        """Leave the connection as it was, or close one that cannot be used any more."""
        try:
            with self._writer.answering(time.monotonic() + ANSWER_WAIT_S):
                self._writer.execute("ROLLBACK")
        except psycopg.Error:
            self._writer.close()

    def put(self, row: SessionRow, *entries: bytes) -> None:
        """Write a session with these entries, in place of all that was there of it. In epoch 1 it
        may be a new one. Raises Moved, NameTaken."""
        self._free_name(row)
        values = self._values(row) | {
            "owner": row.owner_id,
            "id": row.session_id,
            "model": row.model,
            "num_entries": len(entries),
            "num_bytes": sum(map(len, entries)),
        }
        before: SessionSize | None = None
        try:
            is_new = self._execute(_OPEN_SESSION, values).rowcount == 1
        except errors.UniqueViolation as error:  # by another, at the same time
            raise NameTaken(f"{row.session_id} is another open session") from error
        if not is_new:
            found = self._execute(_REPLACE_SESSION, values).fetchone()
            if found is None:
                raise Moved(f"session {row.number} is not held in epoch {row.epoch}")
            before = SessionSize(*found)
        size = SessionSize(row.expires_s, values["num_bytes"], len(row.settings))
        self._changes.change(row.owner_id, before, size)
        self._execute("DELETE FROM entries WHERE session = %s", (row.number,))
        self._execute(_PUT_ENTRIES, (row.number, row.epoch, list(entries)))

    def _free_name(self, row: SessionRow) -> None:
        """Give another name to an earlier session of this one: it has expired, and nobody holds
        it. Raises NameTaken if it may still be used."""
        query = (
            f"SELECT number, {IS_OVER} AND NOT {IS_ANOTHERS} FROM sessions"  # noqa: S608
            " WHERE owner = %(owner)s AND id = %(id)s AND number <> %(number)s FOR UPDATE"
        )
        values = {"owner": row.owner_id, "id": row.session_id, "number": row.number}
        found = self._execute(query, values | {"me": self.replica_id}).fetchone()
        if found is None:
            return
        number, is_over = found
        if not is_over:
            raise NameTaken(f"{row.session_id} is another open session")
        # Whoever held it does not write it under its new name.
        query = (
            f"UPDATE sessions SET {_BEGIN_TO_DELETE}, expires = least(expires, 1),"  # noqa: S608
            " holder = NULL WHERE number = %s"
        )
        self._execute(query, (number,))

    def append(self, row: SessionRow, *entries: bytes) -> None:
        """Write entries behind `row.num_entries` others. Raises Behind if there are not as many,
        Moved."""
        values = self._values(row) | {
            "num_entries": row.num_entries,
            "num_added": len(entries),
            "num_bytes": sum(map(len, entries)),
            "entries": list(entries),
        }
        found = self._execute(_CHANGE_SESSION, values).fetchone()
        if found is not None:
            before = SessionSize(*found)
            num_bytes = before.num_bytes + values["num_bytes"]
            after = SessionSize(row.expires_s, num_bytes, len(row.settings))
            self._changes.change(row.owner_id, before, after)
            return
        query = "SELECT FROM sessions WHERE number = %s AND holder = %s AND epoch = %s"
        if self._execute(query, (row.number, self.replica_id, row.epoch)).rowcount == 1:
            raise Behind(f"session {row.number} has not {row.num_entries} entries")
        raise Moved(f"session {row.number} is not held in epoch {row.epoch}")

    def touch(self, row: SessionRow) -> None:
        """Write what the row says, but no entry. Raises Behind, Moved, as `append`."""
        self.append(row)

    def delete_some(self, number: int, epoch: int | None = None) -> Freed | None:
        """Delete a session, or the last entries of a long one; None if it is not there. Raises
        Moved if another live replica holds it, or somebody has held it since that epoch."""
        found = self._locked(number, epoch)
        if found is None:
            return None
        owner_id, size = found
        num_retired = size.num_bytes if size.expires_s == 0 else 0
        start, num_bytes = self._last_entries(number)
        if start == 0:
            self._execute("DELETE FROM sessions WHERE number = %s", (number,))
            self._changes.change(owner_id, size, None)
            total = size.num_bytes + size.num_row_bytes
            return Freed(owner_id, total, num_retired, is_gone=True)
        left = size._replace(num_bytes=size.num_bytes - num_bytes, expires_s=-1)
        self._changes.change(owner_id, size, left)
        query = "DELETE FROM entries WHERE session = %s AND position >= %s"
        self._execute(query, (number, start))
        hidden = "" if size.expires_s < 0 else f"{_BEGIN_TO_DELETE}, expires = -1, "
        query = f"UPDATE sessions SET {hidden}num_entries = %s, num_bytes = %s WHERE number = %s"  # noqa: S608
        self._execute(query, (start, left.num_bytes, number))
        return Freed(owner_id, num_bytes, num_retired, is_gone=False)

    def _last_entries(self, number: int) -> tuple[int, int]:
        """Return the position from which on one write deletes the entries of a session, and their
        bytes."""
        query = (
            "SELECT position, octet_length(entry) FROM entries WHERE session = %s"
            " ORDER BY position DESC LIMIT %s"
        )
        start, total = 0, 0
        for position, num_bytes in self._execute(query, (number, DELETED_ENTRIES)):
            if total and total + num_bytes > DELETED_BYTES:
                break
            start, total = position, total + num_bytes
        return start, total

    def retire(self, number: int, epoch: int | None = None) -> int:
        """Let a session have expired long ago, and its id be free; its tokens can be read. Return
        the bytes of its entries, 0 if it is not there. Raises Moved as `delete_some` does."""
        found = self._locked(number, epoch)
        if found is None:
            return 0
        owner_id, size = found
        query = f"UPDATE sessions SET {_BEGIN_TO_DELETE}, expires = 0 WHERE number = %s"  # noqa: S608
        self._execute(query, (number,))
        self._changes.change(owner_id, size, size._replace(expires_s=0))
        return size.num_bytes

    def _locked(self, number: int, epoch: int | None) -> tuple[str, SessionSize] | None:
        """Return the owner and the size of a session that this replica may delete, which nobody
        takes meanwhile; None if it is not there. Raises Moved."""
        query = (
            "SELECT owner, epoch, expires, num_bytes, octet_length(settings) FROM sessions"
            " WHERE number = %s FOR UPDATE"
        )
        found = self._execute(query, (number,)).fetchone()
        if found is None:
            return None
        owner_id, found_epoch, *of_session = found
        size = SessionSize(*of_session)
        if size.expires_s <= 0:
            return owner_id, size  # its deletion has begun: anybody goes on with it
        query = f"SELECT FROM sessions WHERE number = %(number)s AND {IS_ANOTHERS}"
        values = {"number": number, "me": self.replica_id}
        if epoch not in (None, found_epoch) or self._execute(query, values).rowcount:
            raise Moved(f"session {number} is another replica's, or was since epoch {epoch}")
        return owner_id, size

    def note_time(self, now_s: float) -> None:
        """Do nothing: the clock of the database is the time; see `noted_s`."""

    def put_record(self, row: RecordRow, parts: Parts) -> None:
        """Write a record with all of its parts, in place of what was there of it. Raises
        NameTaken."""
        condition = "number = %s AND owner = %s AND id = %s"
        self._delete_records(condition, row.number, row.owner_id, row.record_id)
        values = (
            *(row.number, row.kind, row.owner_id, row.record_id, row.session_id),
            *(row.num_bytes, row.used, row.num_writes + 1),
        )
        try:
            query = "INSERT INTO records VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
            self._execute(query, values)
        except errors.UniqueViolation as error:
            raise NameTaken(f"record {row.number}, {row.record_id}, is another one") from error
        self._changes.add_record_bytes(row.owner_id, row.kind, row.num_bytes)
        self._put_parts(row.number, parts)

    def change_record(self, row: RecordRow, parts: Parts, removed: Sequence[int]) -> None:
        """Write parts of a record, and delete some. Raises Behind if it was not written
        `row.num_writes` times before, `row.used_last` the last time, or is not there."""
        found = self._execute(
            "WITH before AS (SELECT num_bytes FROM records WHERE number = %(number)s)"
            " UPDATE records SET num_bytes = %(num_bytes)s, used = %(used)s,"
            " num_writes = num_writes + 1"
            " WHERE number = %(number)s AND num_writes = %(num_writes)s"
            " AND %(used_last)s IN (0, used)"
            " RETURNING owner, kind, %(num_bytes)s - (SELECT num_bytes FROM before)",
            structs.asdict(row),
        ).fetchone()
        if found is None:
            raise Behind(f"record {row.number} was not written {row.num_writes} times")
        self._changes.add_record_bytes(*found)
        self._put_parts(row.number, parts)
        query = "DELETE FROM parts WHERE record = %s AND position = ANY(%s::bigint[])"
        self._execute(query, (row.number, list(removed)))

    def delete_record(self, number: int) -> None:
        """Delete a record and its parts, if it is there."""
        self._delete_records("number = %s", number)

    def _delete_records(self, condition: str, *values: int | str) -> None:
        query = f"DELETE FROM records WHERE {condition} RETURNING owner, kind, num_bytes"  # noqa: S608
        for owner_id, kind, num_bytes in self._execute(query, values).fetchall():
            self._changes.add_record_bytes(owner_id, kind, -num_bytes)

    def _put_parts(self, number: int, parts: Parts) -> None:
        # Of several at one position the last is meant, as where one is written after another.
        last = dict(parts)
        query = (
            "INSERT INTO parts SELECT %s, position, part FROM"
            " unnest(%s::bigint[], %s::bytea[]) AS given (position, part)"
            " ON CONFLICT (record, position) DO UPDATE SET part = EXCLUDED.part"
        )
        self._execute(query, (number, list(last), list(last.values())))

    def evict_records(self, owner_id: str | None, most_bytes: int) -> list[tuple[str, int]]:
        """Delete records; see `SharedDatabase`. No commit waits for it: it has one of its own."""
        values = {
            "owner": owner_id,
            "most": most_bytes,
            "limit": EVICTED_AT_ONCE,
            "slot": self.slot,
            "me": self.replica_id,
        }
        query = EVICT_OF_ALL if owner_id is None else EVICT_OF_OWNER
        return [(owner, num_bytes) for owner, num_bytes in self._read(query, values)]

    def _values(self, row: SessionRow) -> dict[str, Any]:
        return {
            "number": row.number,
            "expires": row.expires_s,
            "settings": row.settings,
            "num_tokens": row.num_tokens,
            "num_turns": row.num_turns,
            "num_uses": row.num_uses,
            "epoch": row.epoch,
            "me": self.replica_id,
        }

    def _execute(
        self, query: str, values: Sequence[Any] | dict[str, Any]
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        return self._writer.execute(query, values, binary=True)
