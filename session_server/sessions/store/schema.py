"""The tables of a store, and what each version of them adds."""

from __future__ import annotations

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
