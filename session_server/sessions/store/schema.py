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
VERSIONS: Final = (_SESSIONS, _RECORDS)
"""What each version of the schema adds to the one before it."""

SCHEMA_VERSION: Final[int] = len(VERSIONS)

COLUMNS: Final = (
    "number, owner, id, model, expires, settings, num_tokens, num_turns, num_uses, num_entries"
)
RECORD_COLUMNS: Final = "number, kind, owner, id, session, num_bytes, used, num_writes"
