"""The SQLite file of a store: who may open it, and every statement that writes.

SQLite in WAL mode commits by appending to one file, and readers see the last commit meanwhile. The
database of a store has one server: a lock on a file beside it says whose it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final, Literal

from session_server.sessions.store.connections import connect
from session_server.sessions.store.deleted_rows import RENAMED, Freed, delete_some
from session_server.sessions.store.directories import sync_directory, write_again
from session_server.sessions.store.disk_health import explain, is_of_disk
from session_server.sessions.store.lock import StoreLock, StoreUnusable, refusal
from session_server.sessions.store.log_frames import (
    MAX_LOG_BYTES,
    committed_bytes,
    index_of,
    log_of,
    shorten,
    size_of,
)
from session_server.sessions.store.lost_pages import check_pages
from session_server.sessions.store.open_files import (
    DATABASE_NAME,
    LOCK_NAME,
    LogGone,
    OpenFiles,
    check_readable,
    tighten,
)
from session_server.sessions.store.reads import Reads
from session_server.sessions.store.records import Parts, RecordRow, SessionRow
from session_server.sessions.store.schema import (
    APPLICATION_ID,
    COLUMNS,
    SCHEMA_VERSION,
    columns_of,
    migrate,
    move_into_rows,
)
from session_server.sessions.store.survey import SurveyAnswer, SurveyQuestion, survey

Durability = Literal["turn", "relaxed"]

_SECRET_BYTES: Final = 32
_MIN_PAGE_BYTES: Final = 512
"""The least that a page of SQLite has. Of a file with less it drops the log."""


class Behind(Exception):
    """Report an entry that does not follow the last one that is there."""


class Database(Reads):
    """Open a store's directory, which is made if there is none. Two threads use it: one calls the
    verbs inside `transaction`, another those that read.

    `secret`: random bytes that live as long as the store.
    """

    FILE: ClassVar = DATABASE_NAME
    read_errors: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error,)

    def __init__(
        self, directory: Path, *, durability: Durability = "turn", is_read_only: bool = False
    ) -> None:
        """Open the database, and bring its schema to this version. One that `is_read_only` may be
        open beside a server, has no verbs, and changes no file.

        Raises:
            StoreIsBusy: a command has it open; see `StoreLock`.
            StoreUnusable: the directory cannot be used, another server has it open, or what is in
                it was written by a later version, is no store, or has lost its content.
        """
        self.path = directory / self.FILE
        self._is_read_only = is_read_only
        self._connections: list[sqlite3.Connection] = []
        self._files: OpenFiles | None = None
        self.has_deleted = True
        """Whether the log may have what was deleted, be it by a process that was killed."""

        self.lock = (StoreLock.shared if is_read_only else StoreLock.alone)(directory)
        try:
            check_readable(directory)
            self._check_content()
            if is_read_only:
                self._open_beside()
                return
            # From now on it is told of as what is on disk. What a checkpoint has copied of it is
            # copied once more, because nothing says how far that came.
            log = log_of(self.path)
            write_again(log, committed_bytes(log))
            self._probe()
            tighten(directory)
            # SQLite would make its files with the permissions that the umask leaves.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            self._writer = self._open_to_write(durability)
            self._migrate()
            self._check_writable()
            # SQLite does so too, for its log, and goes on if that fails.
            sync_directory(directory)
            self._reader = self._connect(self.path)
            self._reader.execute("PRAGMA query_only = ON")
            self._files = OpenFiles(self.path, directory / LOCK_NAME)
            self.secret = self._find_secret()
            self._note_made()
        except (OSError, sqlite3.OperationalError) as error:
            self._release()
            raise refusal(directory, error) from error
        except sqlite3.DatabaseError as error:
            self._release()
            raise StoreUnusable(self._say(f"is damaged ({error})")) from error
        except StoreUnusable:
            self._release()
            raise

    def _open_to_write(self, durability: Durability) -> sqlite3.Connection:
        writer = self._connect(self.path)
        # SQLite takes this from the first bytes of a file, also where the rest is not there: what a
        # crash has left of a new one.
        writer.execute("PRAGMA auto_vacuum = NONE")
        (mode,) = writer.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            directory = self.path.parent
            raise StoreUnusable(f"--store {directory}: no WAL there: use a local file system")
        # What a client deletes is not left behind in free pages.
        writer.execute("PRAGMA secure_delete = ON")
        writer.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
        # FULL waits for the disk in every commit, NORMAL leaves that to the system: a commit then
        # outlives the process, and not always the machine.
        writer.execute(f"PRAGMA synchronous = {'FULL' if durability == 'turn' else 'NORMAL'}")
        writer.execute("PRAGMA foreign_keys = ON")
        return writer

    def _connect(self, place: Path | str) -> sqlite3.Connection:
        connection = connect(place)
        self._connections.append(connection)
        return connection

    def _open_beside(self) -> None:
        """Open the database to read it, whether or not a server has it open. Raises StoreUnusable,
        OSError, sqlite3.Error."""
        # SQLite would make the files of a log; where nothing is in one, nobody needs them.
        is_still = not self.lock.is_anothers and not size_of(log_of(self.path))
        mode = "mode=ro&immutable=1" if is_still else "mode=ro"
        self._has_index = index_of(self.path).exists()
        self._writer = self._reader = self._connect(f"{self.path.absolute().as_uri()}?{mode}")
        check_pages(self._reader, self.path)
        version = self._check_version(self._reader)
        if version == 0:
            raise StoreUnusable(self._say("has no content"))
        self._columns = columns_of(version)
        self.secret = b""

    def _probe(self) -> None:
        """Read the database before anything can be written to it: to close one that is damaged
        would put there what its log has, and one of something else is left as it is. One with a
        journal is still being made, and can only be read once that is undone. Raises StoreUnusable,
        sqlite3.Error."""
        journal = self.path.with_name(f"{self.FILE}-journal")
        if size_of(self.path) and not size_of(journal):
            with contextlib.closing(connect(f"{self.path.absolute().as_uri()}?mode=ro")) as probe:
                check_pages(probe, self.path)
                self._check_version(probe)

    def _check_content(self) -> None:
        """Raise StoreUnusable if the database has no content, and had some: SQLite would begin a
        new one, and drop what its log still has of the old one."""
        size = size_of(self.path)
        is_new = not (self._is_read_only or self.lock.says_made or size_of(log_of(self.path)))
        if size == 0 and not is_new:
            raise StoreUnusable(self._say("is empty" if self.path.exists() else "is gone"))
        # Whoever made a new one may have been cut off in the midst of its first page.
        if 0 < size < _MIN_PAGE_BYTES and not is_new:
            raise StoreUnusable(self._say(f"is damaged ({size} bytes are no database)"))

    def _note_made(self) -> None:
        """Have it on disk that this store was made, behind the store itself."""
        if self.lock.says_made:
            return
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        sync_directory(self.path.parent)
        self.lock.say_made()

    def _say(self, how: str) -> str:
        """Return what is wrong with the database, and what to do."""
        directory = self.path.parent
        return (
            f"--store {directory}: {self.path} {how}: put a backup in its place, or move the store "
            f"away (mv {directory} {directory}.lost) and begin a new one"
        )

    def _disconnect(self) -> None:
        """Close all connections. SQLite shares much between those of one process, whether they can
        write for one: none that has failed may stay behind."""
        while self._connections:
            self._connections.pop().close()

    def _release(self) -> None:
        self._disconnect()
        if self._files is not None:
            self._files.close()
        self.lock.release()

    def close(self) -> None:
        """Close the database; another server may open it then."""
        if not self._is_read_only:
            # On a full disk the log stays as it is: it has all that was committed.
            with contextlib.suppress(sqlite3.Error):
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._disconnect()
        if self._is_read_only and not self.lock.is_anothers and not self._has_index:
            index_of(self.path).unlink(missing_ok=True)  # made to read a log that a crash left
        self._release()

    @property
    def place(self) -> str:
        """Return the store's directory, as `--store` has it."""
        return str(self.path.parent)

    @property
    def directory(self) -> Path:
        """Return the store's directory."""
        return self.path.parent

    def is_unavailable(self, error: Exception) -> bool:
        """Return whether the disk is at fault; see `is_of_disk`."""
        return is_of_disk(error)

    def fails_all(self, error: Exception) -> bool:
        """Return whether each write would fail as this one did, and not for what it was."""
        return isinstance(error, sqlite3.OperationalError)

    def is_passing(self, error: Exception) -> bool:
        """Return False: there is one writer."""
        return False

    def explain(self, error: Exception) -> str:
        """Return what an error says, and of the disk how much room there is."""
        return explain(error, self.path.parent)

    def survey(self, question: SurveyQuestion) -> SurveyAnswer:
        """Look through all sessions, on a connection of its own. Raises sqlite3.Error."""
        return survey(self.path, question)

    def back_up(self, path: Path) -> None:
        """Copy all of it, as of one commit, into a database at a path. Raises sqlite3.Error."""
        with contextlib.closing(connect(path)) as copy:
            self._reader.backup(copy)

    def vacuum(self) -> None:
        """Give back the space of what was deleted, and of how earlier versions wrote."""
        with self.transaction():
            move_into_rows(self._writer)
        self._writer.execute("VACUUM")
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def shorten_log(self, *, erases: bool) -> None:
        """Empty a log that has grown long, or if it `erases` has what was deleted; see `shorten`.
        Raises OSError, sqlite3.Error."""
        is_long = not (erases and self.has_deleted)
        if shorten(self._writer, self.path, is_long=is_long):
            self.has_deleted = False

    # -- verbs, inside a transaction

    @contextlib.contextmanager
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
        self._check_files()

    def _check_files(self) -> None:
        """Raise sqlite3.OperationalError if the files are not those that were opened."""
        if self._files is None:
            return  # a new one is being made
        try:
            self._files.check()
        except LogGone:
            # Where nobody finds the log any more, the database has all that was told.
            with contextlib.suppress(sqlite3.Error):
                self._writer.execute("PRAGMA wal_checkpoint(FULL)")
            raise

    def put(self, row: SessionRow, *entries: bytes) -> None:
        """Write a session with these entries, in place of all that was there of it."""
        execute = self._writer.execute
        self.delete(row.number)
        # An earlier session of this name may still be there: it has expired, or to delete it has
        # failed. It expires by another name.
        execute(
            f"UPDATE sessions SET {RENAMED}, expires = min(expires, 1) WHERE owner = ? AND id = ?",  # noqa: S608
            (row.owner_id, row.session_id),
        )
        values = (
            *(row.number, row.owner_id, row.session_id, row.model, row.expires_s),
            *(row.settings, row.num_tokens, row.num_turns, row.num_uses),
            *(len(entries), sum(map(len, entries))),
        )
        execute(f"INSERT INTO sessions ({COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?)", values)  # noqa: S608
        self._put_entries(row.number, 0, entries)

    def append(self, row: SessionRow, *entries: bytes) -> None:
        """Write entries behind `row.num_entries` others. Raises Behind if there are not as many, or
        no such session."""
        self._update(row, row.num_entries + len(entries), sum(map(len, entries)))
        self._put_entries(row.number, row.num_entries, entries)

    def _put_entries(self, number: int, start: int, entries: Sequence[bytes]) -> None:
        values = [(number, position, entry) for position, entry in enumerate(entries, start)]
        self._writer.executemany("INSERT INTO entries VALUES (?, ?, ?)", values)

    def touch(self, row: SessionRow) -> None:
        """Write what the row says, but no entry. Raises Behind as `append` does."""
        self._update(row, row.num_entries, 0)

    def delete(self, number: int) -> None:
        """Delete a session and its entries, if it is there."""
        found = self._writer.execute("DELETE FROM sessions WHERE number = ?", (number,))
        self.has_deleted |= found.rowcount > 0

    def delete_some(self, number: int, epoch: int | None = None) -> Freed | None:
        """Delete a session, or the last entries of a long one; None if it is not there."""
        self.has_deleted = True
        return delete_some(self._writer, number)

    def retire(self, number: int, epoch: int | None = None) -> int:
        """Let a session have expired long ago, and its id be free; its tokens can be read. Return
        the bytes of its entries, 0 if it is not there."""
        query = f"UPDATE sessions SET {RENAMED}, expires = 0 WHERE number = ?"  # noqa: S608
        self._writer.execute(query, (number,))
        query = "SELECT num_bytes FROM sessions WHERE number = ?"
        found = self._writer.execute(query, (number,)).fetchone()
        return 0 if found is None else int(found[0])

    def note_time(self, now_s: float) -> None:
        """Write the time, by which a later server knows how long none was there."""
        query = "INSERT OR REPLACE INTO facts VALUES ('time', ?)"
        self._writer.execute(query, (repr(now_s).encode(),))

    def _update(self, row: SessionRow, num_entries: int, num_bytes: int) -> None:
        values = (
            *(row.expires_s, row.settings, row.num_tokens, row.num_turns),
            *(row.num_uses, num_entries, num_bytes, row.number, row.num_entries),
        )
        found = self._writer.execute(
            "UPDATE sessions SET expires = ?, settings = ?, num_tokens = ?, num_turns = ?,"
            " num_uses = ?, num_entries = ?, num_bytes = num_bytes + ?"
            " WHERE number = ? AND num_entries = ?",
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
        `row.num_writes` times before, `row.used_last` the last time, or is not there."""
        found = self._writer.execute(
            "UPDATE records SET num_bytes = ?, used = ?, num_writes = num_writes + 1"
            " WHERE number = ? AND num_writes = ? AND ? IN (0, used)",
            (row.num_bytes, row.used, row.number, row.num_writes, row.used_last),
        )
        if found.rowcount != 1:
            raise Behind(f"record {row.number} was not written {row.num_writes} times")
        self._put_parts(row.number, parts)
        query = "DELETE FROM parts WHERE record = ? AND position = ?"
        self._writer.executemany(query, [(row.number, position) for position in removed])
        self.has_deleted |= bool(removed)

    def delete_record(self, number: int) -> None:
        """Delete a record and its parts, if it is there."""
        self.has_deleted = True
        self._writer.execute("DELETE FROM records WHERE number = ?", (number,))

    def _put_parts(self, number: int, parts: Parts) -> None:
        query = "INSERT OR REPLACE INTO parts VALUES (?, ?, ?)"
        self._writer.executemany(query, [(number, *part) for part in parts])

    # -- its version

    @property
    def version(self) -> int:
        """Return the version of the schema, 0 for a new file."""
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        return int(version)

    def _check_version(self, connection: sqlite3.Connection) -> int:
        """Return the version of the schema, 0 for a new file. Raises StoreUnusable."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if version > SCHEMA_VERSION and application == APPLICATION_ID:
            raise StoreUnusable(
                f"{self.path} is of version {version}, and this server knows {SCHEMA_VERSION}: "
                "start the version that wrote it, or pass another --store"
            )
        if (version or num_tables) and application != APPLICATION_ID:
            raise StoreUnusable(f"{self.path} is no store of this server: pass another --store")
        return int(version)

    def _migrate(self) -> None:
        """Bring the tables to this version, those of a new store too. Raises StoreUnusable."""
        version = self._check_version(self._writer)
        if version == 0 and self.lock.says_made:
            raise StoreUnusable(self._say("has no content"))
        if version < SCHEMA_VERSION:
            with self.transaction():
                migrate(self._writer, version)
                if version == 0:
                    secret = secrets.token_bytes(_SECRET_BYTES)
                    self._writer.execute("INSERT INTO facts VALUES ('secret', ?)", (secret,))

    def _check_writable(self) -> None:
        """Raise sqlite3.OperationalError if nothing can be written. Where SQLite cannot open a file
        to write, for want of memory or of descriptors, it opens it to read, and says nothing."""
        self._writer.execute("BEGIN")
        try:
            self._writer.execute("UPDATE facts SET value = value")
        finally:
            self._writer.execute("ROLLBACK")

    def _find_secret(self) -> bytes:
        """Return the secret of the store. Raises StoreUnusable."""
        query = "SELECT value FROM facts WHERE name = 'secret'"
        found = self._reader.execute(query).fetchone()
        if found is None:
            raise StoreUnusable(f"{self.path} has lost its secret: pass another --store")
        return bytes(found[0])
