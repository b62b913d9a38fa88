"""The SQLite file of a store: its schema, who may open it, and every statement.

SQLite in WAL mode commits by appending to one file, and readers see the last commit meanwhile. The
database of a store has one server: a lock on a file beside it says whose it is.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from session_server.sessions.store.records import Parts, RecordRow, SessionRow

Durability = Literal["turn", "relaxed"]

APPLICATION_ID: Final = 0x53535253

_LOCK_NAME: Final = "lock"
_SECRET_BYTES: Final = 32
_PAGE_ROWS: Final = 256
_BUSY_S: Final = 1.0
"""How long a statement waits for whoever else has locked the database."""

_SESSIONS: Final = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    model BLOB NOT NULL,
    expires REAL NOT NULL,
    settings BLOB NOT NULL,
    num_tokens INTEGER NOT NULL,
    num_turns INTEGER NOT NULL,
    num_uses INTEGER NOT NULL,
    num_entries INTEGER NOT NULL,
    UNIQUE (owner, id)
) STRICT;
CREATE INDEX sessions_of_owner ON sessions (owner, number);
CREATE INDEX sessions_by_expiry ON sessions (expires);
CREATE TABLE entries (
    session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    entry BLOB NOT NULL,
    PRIMARY KEY (session, position)
) STRICT, WITHOUT ROWID;
"""
_RECORDS: Final = """
CREATE TABLE records (
    number INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    session TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    used INTEGER NOT NULL,
    num_writes INTEGER NOT NULL,
    UNIQUE (owner, id)
) STRICT;
CREATE TABLE parts (
    record INTEGER NOT NULL REFERENCES records (number) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    part BLOB NOT NULL,
    PRIMARY KEY (record, position)
) STRICT, WITHOUT ROWID;
"""
_VERSIONS: Final = (_SESSIONS, _RECORDS)
"""What each version of the schema adds to the one before it."""

SCHEMA_VERSION: Final[int] = len(_VERSIONS)

_COLUMNS: Final = (
    "number, owner, id, model, expires, settings, num_tokens, num_turns, num_uses, num_entries"
)
_RECORD_COLUMNS: Final = "number, kind, owner, id, session, num_bytes, used, num_writes"


class StoreUnusable(Exception):
    """Report a store that this server cannot open; the message says what to do."""


class Behind(Exception):
    """Report an entry that does not follow the last one that is there."""


class Database:
    """Open a store's directory, which is made if there is none. Two threads use it: one calls the
    verbs inside `transaction`, another those that read.

    `secret`: random bytes that live as long as the store.
    """

    FILE: ClassVar = "sessions.sqlite3"

    def __init__(
        self, directory: Path, *, durability: Durability = "turn", is_read_only: bool = False
    ) -> None:
        """Open the database, and bring its schema to this version. One that `is_read_only` is open
        beside a server, and has no verbs.

        Raises:
            StoreUnusable: the directory cannot be used, another server has it open, or what is in
                it was written by a later version or is no store.
        """
        self.path = directory / self.FILE
        self._lock_fd = None if is_read_only else _lock(directory)
        try:
            if is_read_only:
                self._open_beside()
                return
            # SQLite would make its files with the permissions that the umask leaves.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            self._inodes = self._find_inodes()
            self._writer = _connect(self.path)
            (mode,) = self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreUnusable(f"--store {directory}: no WAL there: use a local file system")
            # What a client deletes is not left behind in free pages.
            self._writer.execute("PRAGMA secure_delete = ON")
            # FULL waits for the disk in every commit, NORMAL leaves that to the system: a commit
            # then outlives the process, and not always the machine.
            level = "FULL" if durability == "turn" else "NORMAL"
            self._writer.execute(f"PRAGMA synchronous = {level}")
            self._writer.execute("PRAGMA foreign_keys = ON")
            self.secret = self._migrate()
            self._reader = _connect(self.path)
            self._reader.execute("PRAGMA query_only = ON")
        except (OSError, sqlite3.Error) as error:
            self._unlock()
            raise StoreUnusable(f"--store {directory}: {error}") from error
        except StoreUnusable:
            self._unlock()
            raise

    def _open_beside(self) -> None:
        """Open the database to read it beside a server. Raises StoreUnusable, sqlite3.Error."""
        self._writer = self._reader = _connect(self.path)
        self._reader.execute("PRAGMA query_only = ON")
        self._check_version()
        self.secret = b""

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    def close(self) -> None:
        """Close the database; another server may open it then."""
        if self._lock_fd is not None:
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._reader.close()
        self._writer.close()
        self._unlock()

    def vacuum(self) -> None:
        """Give the space of what was deleted back to the disk."""
        self._writer.execute("VACUUM")
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # -- verbs, inside a transaction

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what happens in the block, all or nothing. Raises sqlite3.Error, Behind."""
        self._check_files()
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    def _check_files(self) -> None:
        """Raise sqlite3.OperationalError if the files are not those that were opened: what is
        written then is lost, or another server's."""
        try:
            found = self._find_inodes()
        except OSError as error:
            raise sqlite3.OperationalError(f"the store's files are gone: {error}") from error
        if found != self._inodes:
            raise sqlite3.OperationalError("the store's files were replaced")

    def _find_inodes(self) -> tuple[int, int]:
        return os.stat(self.path).st_ino, os.stat(self.path.with_name(_LOCK_NAME)).st_ino

    def put(self, row: SessionRow, entry: bytes) -> None:
        """Write a session with one entry, in place of all that was there of it."""
        execute = self._writer.execute
        # An earlier session of this name may still be there: to delete it may have failed.
        names = (row.number, row.owner_id, row.session_id)
        execute("DELETE FROM sessions WHERE number = ? OR (owner = ? AND id = ?)", names)
        values = (
            *(row.number, row.owner_id, row.session_id, row.model, row.expires_s),
            *(row.settings, row.num_tokens, row.num_turns, row.num_uses, 1),
        )
        execute(f"INSERT INTO sessions ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?)", values)  # noqa: S608
        execute("INSERT INTO entries VALUES (?, 0, ?)", (row.number, entry))

    def append(self, row: SessionRow, entry: bytes) -> None:
        """Write an entry behind `row.num_entries` others. Raises Behind if there are not as many,
        or no such session."""
        self._update(row, row.num_entries + 1)
        values = (row.number, row.num_entries, entry)
        self._writer.execute("INSERT INTO entries VALUES (?, ?, ?)", values)

    def touch(self, row: SessionRow) -> None:
        """Write what the row says, but no entry. Raises Behind as `append` does."""
        self._update(row, row.num_entries)

    def delete(self, number: int) -> None:
        """Delete a session and its entries, if it is there."""
        self._writer.execute("DELETE FROM sessions WHERE number = ?", (number,))

    def _update(self, row: SessionRow, num_entries: int) -> None:
        values = (
            *(row.expires_s, row.settings, row.num_tokens, row.num_turns),
            *(row.num_uses, num_entries, row.number, row.num_entries),
        )
        found = self._writer.execute(
            "UPDATE sessions SET expires = ?, settings = ?, num_tokens = ?, num_turns = ?,"
            " num_uses = ?, num_entries = ? WHERE number = ? AND num_entries = ?",
            values,
        )
        if found.rowcount != 1:
            raise Behind(f"session {row.number} has not {row.num_entries} entries")

    def put_record(self, row: RecordRow, parts: Parts) -> None:
        """Write a record with all of its parts, in place of what was there of it."""
        if row.num_writes:
            self.delete_record(row.number)
        values = (
            *(row.number, row.kind, row.owner_id, row.record_id, row.session_id),
            *(row.num_bytes, row.used, row.num_writes + 1),
        )
        self._writer.execute("INSERT INTO records VALUES (?,?,?,?,?,?,?,?)", values)
        self._put_parts(row.number, parts)

    def change_record(self, row: RecordRow, parts: Parts, removed: Sequence[int]) -> None:
        """Write parts of a record, and delete some. Raises Behind if it was not written
        `row.num_writes` times before, or is not there."""
        found = self._writer.execute(
            "UPDATE records SET num_bytes = ?, used = ?, num_writes = num_writes + 1"
            " WHERE number = ? AND num_writes = ?",
            (row.num_bytes, row.used, row.number, row.num_writes),
        )
        if found.rowcount != 1:
            raise Behind(f"record {row.number} was not written {row.num_writes} times")
        self._put_parts(row.number, parts)
        query = "DELETE FROM parts WHERE record = ? AND position = ?"
        self._writer.executemany(query, [(row.number, position) for position in removed])

    def delete_record(self, number: int) -> None:
        """Delete a record and its parts, if it is there."""
        self._writer.execute("DELETE FROM records WHERE number = ?", (number,))

    def _put_parts(self, number: int, parts: Parts) -> None:
        query = "INSERT OR REPLACE INTO parts VALUES (?, ?, ?)"
        self._writer.executemany(query, [(number, *part) for part in parts])

    # -- reading

    def find(self, owner_id: str, session_id: str) -> SessionRow | None:
        """Return a session as of the last commit."""
        rows = self._rows("owner = ? AND id = ?", (owner_id, session_id))
        return next(iter(rows), None)

    def page(self, owner_id: str, *, after: int, now_s: float, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions of an owner that have a higher number and have not expired,
        in order."""
        condition = "owner = ? AND number > ? AND expires >= ? ORDER BY number LIMIT ?"
        return self._rows(condition, (owner_id, after, now_s, limit))

    def count_of(self, owner_id: str, *, now_s: float, most: int) -> int:
        """Return how many sessions of an owner have not expired; look at no more than `most`."""
        query = (
            "SELECT count(*) FROM (SELECT 1 FROM sessions WHERE owner = ? AND expires >= ? LIMIT ?)"
        )
        (found,) = self._reader.execute(query, (owner_id, now_s, most)).fetchone()
        return int(found)

    def expired(self, now_s: float, *, limit: int) -> list[SessionRow]:
        """Return up to `limit` sessions that have expired."""
        return self._rows("expires < ? ORDER BY expires LIMIT ?", (now_s, limit))

    def entries(self, number: int) -> list[bytes]:
        """Return the entries of a session, in order."""
        rows = self._reader.execute(
            "SELECT entry FROM entries WHERE session = ? ORDER BY position", (number,)
        )
        return [entry for (entry,) in rows]

    def walk(self, owner_id: str | None) -> Iterator[SessionRow]:
        """Yield all sessions of an owner, or of everybody, in order."""
        after = 0
        while True:
            condition = "number > ? AND (? IS NULL OR owner = ?) ORDER BY number LIMIT ?"
            rows = self._rows(condition, (after, owner_id, owner_id, _PAGE_ROWS))
            yield from rows
            if len(rows) < _PAGE_ROWS:
                return
            after = rows[-1].number

    def count(self) -> tuple[int, int]:
        """Return how many sessions there are, and the highest number."""
        query = "SELECT count(*), coalesce(max(number), 0) FROM sessions"
        num_sessions, last = self._reader.execute(query).fetchone()
        return int(num_sessions), int(last)

    def records(self) -> list[RecordRow]:
        """Return all records, that first which was not written for longest."""
        query = f"SELECT {_RECORD_COLUMNS} FROM records ORDER BY used"  # noqa: S608 - our own words
        return [RecordRow(*columns) for columns in self._reader.execute(query)]

    def parts(self, number: int) -> Parts:
        """Return the parts of a record, in order."""
        query = "SELECT position, part FROM parts WHERE record = ? ORDER BY position"
        return self._reader.execute(query, (number,)).fetchall()

    def _rows(self, condition: str, values: Sequence[Any]) -> list[SessionRow]:
        query = f"SELECT {_COLUMNS} FROM sessions WHERE {condition}"  # noqa: S608 - our own words
        return [SessionRow(*columns) for columns in self._reader.execute(query, values)]

    def _check_version(self) -> int:
        """Return the version of the schema, 0 for a new file. Raises StoreUnusable."""
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        (application,) = self._writer.execute("PRAGMA application_id").fetchone()
        (num_tables,) = self._writer.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if version > SCHEMA_VERSION and application == APPLICATION_ID:
            raise StoreUnusable(
                f"{self.path} is of version {version}, and this server knows {SCHEMA_VERSION}: "
                "start the version that wrote it, or pass another --store"
            )
        if (version or num_tables) and application != APPLICATION_ID:
            raise StoreUnusable(f"{self.path} is no store of this server: pass another --store")
        return int(version)

    def _migrate(self) -> bytes:
        """Bring the tables to this version, those of a new store too, and return its secret. Raises
        StoreUnusable."""
        version = self._check_version()
        if version < SCHEMA_VERSION:
            with self.transaction():
                for statement in "".join(_VERSIONS[version:]).split(";\n"):
                    self._writer.execute(statement)
                if version == 0:
                    secret = secrets.token_bytes(_SECRET_BYTES)
                    self._writer.execute("INSERT INTO facts VALUES ('secret', ?)", (secret,))
                self._writer.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        query = "SELECT value FROM facts WHERE name = 'secret'"
        found = self._writer.execute(query).fetchone()
        if found is None:
            raise StoreUnusable(f"{self.path} has lost its secret: pass another --store")
        return bytes(found[0])


def _connect(path: Path) -> sqlite3.Connection:
    # Whoever opens it uses it on another thread; each connection is used by one at a time.
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def _lock(directory: Path) -> int:
    """Make the directory and lock it for this process; return the descriptor that holds the lock.
    Raises StoreUnusable."""
    try:
        _make(directory)
        fd = os.open(
            directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError as error:
        raise StoreUnusable(f"--store {directory}: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StoreUnusable(
            f"--store {directory}: another server has it open; pass another directory, or stop "
            "that server"
        ) from error
    return fd


def _make(directory: Path) -> None:
    """Make a directory, and those above it, for this user alone, unless they are there."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
        _sync(directory.parent)


def _sync(directory: Path) -> None:
    """Have the entries of a directory on disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
