"""The tables of a store, and what each version of them adds."""

from __future__ import annotations

import sqlite3
from typing import Final

APPLICATION_ID: Final = 0x53535253
"""What marks a database as a store."""

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
_SIZES: Final = """
ALTER TABLE sessions ADD COLUMN num_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE sessions SET num_bytes =
    (SELECT coalesce(sum(length(entry)), 0) FROM entries WHERE session = number);
"""
_ROWS: Final = """
CREATE TABLE entries_in_rows (
    session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    entry BLOB NOT NULL,
    PRIMARY KEY (session, position)
) STRICT;
INSERT INTO entries_in_rows SELECT * FROM entries;
DROP TABLE entries;
ALTER TABLE entries_in_rows RENAME TO entries;
CREATE TABLE parts_in_rows (
    record INTEGER NOT NULL REFERENCES records (number) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    part BLOB NOT NULL,
    PRIMARY KEY (record, position)
) STRICT;
INSERT INTO parts_in_rows SELECT * FROM parts;
DROP TABLE parts;
ALTER TABLE parts_in_rows RENAME TO parts;
"""
"""Without a rowid what has more than a kilobyte takes whole pages of its own, up to three times its
bytes. To move all of it takes too long for a start: a new store begins so, and `vacuum` moves."""

VERSIONS: Final = (_SESSIONS, _RECORDS, _SIZES)
"""What each version of the schema adds to the one before it."""

SCHEMA_VERSION: Final[int] = len(VERSIONS)

COLUMNS: Final = (
    "number, owner, id, model, expires, settings, num_tokens, num_turns, num_uses, num_entries,"
    " num_bytes"
)
_UNSIZED: Final = 2
"""The last version whose sessions do not say how many bytes they have."""

RECORD_COLUMNS: Final = "number, kind, owner, id, session, num_bytes, used, num_writes"


def columns_of(version: int) -> str:
    """Return what is read of a session in a store of this version."""
    return COLUMNS if version > _UNSIZED else COLUMNS.replace("num_bytes", "0")


def migrate(database: sqlite3.Connection, version: int) -> None:
    """Bring the tables of a store from a version to this one; call it inside a transaction. Raises
    sqlite3.Error."""
    _run(database, "".join(VERSIONS[version:]))
    if version == 0:
        move_into_rows(database)
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def move_into_rows(database: sqlite3.Connection) -> None:
    """Move what an earlier version has written into tables that take less room, unless it is there
    already; as `migrate`."""
    query = (
        "SELECT count(*) FROM sqlite_schema WHERE name = 'entries' AND sql LIKE '%WITHOUT ROWID'"
    )
    (num_old,) = database.execute(query).fetchone()
    if num_old:
        _run(database, _ROWS)


def _run(database: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";\n"):
        database.execute(statement)
