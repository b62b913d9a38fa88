"""The tables in PostgreSQL, and what each version of them adds."""

from __future__ import annotations

import logging
import math
import secrets
from typing import Final

from psycopg import errors

from session_server.sessions.postgres import holdings
from session_server.sessions.postgres.connections import SCHEMA, PostgresConnection
from session_server.sessions.store import schema
from session_server.sessions.store.lock import StoreUnusable

_logger: Final = logging.getLogger("session_server.store")

_TABLES: Final = """
CREATE TABLE facts (name text PRIMARY KEY, value bytea NOT NULL);
CREATE TABLE replicas (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    slot int NOT NULL UNIQUE,
    address text NOT NULL,
    expires timestamptz NOT NULL
);
CREATE TABLE sessions (
    number bigint PRIMARY KEY,
    owner text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    model bytea NOT NULL,
    expires double precision NOT NULL,
    settings bytea NOT NULL,
    num_tokens bigint NOT NULL,
    num_turns bigint NOT NULL,
    num_uses bigint NOT NULL,
    num_entries bigint NOT NULL,
    num_bytes bigint NOT NULL,
    holder bigint,
    epoch bigint NOT NULL,
    CONSTRAINT sessions_by_name UNIQUE (owner, id)
);
CREATE INDEX sessions_of_owner ON sessions (owner, number);
CREATE INDEX sessions_by_expiry ON sessions (expires, number);
CREATE INDEX sessions_of_holder ON sessions (holder) WHERE holder IS NOT NULL;
CREATE TABLE entries (
    session bigint NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,
    position bigint NOT NULL,
    entry bytea NOT NULL,
    epoch bigint NOT NULL,
    PRIMARY KEY (session, position)
);
CREATE TABLE records (
    number bigint PRIMARY KEY,
    kind text NOT NULL,
    owner text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    session text NOT NULL,
    num_bytes bigint NOT NULL,
    used bigint NOT NULL,
    num_writes bigint NOT NULL,
    UNIQUE (owner, id)
);
CREATE TABLE parts (
    record bigint NOT NULL REFERENCES records (number) ON DELETE CASCADE,
    position bigint NOT NULL,
    part bytea NOT NULL,
    PRIMARY KEY (record, position)
);
"""
_HOLDERS: Final = """
DROP INDEX sessions_of_holder;
CREATE INDEX sessions_of_holder ON sessions (holder, number) WHERE holder IS NOT NULL;
"""
_ROLES: Final = "ALTER TABLE replicas ADD COLUMN IF NOT EXISTS role text NOT NULL DEFAULT 'both';"
_MADE_IN: Final = "CREATE INDEX IF NOT EXISTS records_of_session ON records (owner, session);"
VERSIONS: Final = (_TABLES, holdings.TABLE + _HOLDERS + _ROLES, _MADE_IN, holdings.KINDS)
"""What each version of the schema adds to the one before it. The name of whoever holds a session is
no reference: a replica that is over is one row less, however many sessions it held."""

SCHEMA_VERSION: Final[int] = len(VERSIONS)

COLUMNS: Final = f"{schema.COLUMNS}, epoch"

MIGRATION_WAIT_S: Final = 60
"""How long a replica waits for another that brings the tables to its version, and how long that may
take."""

_ANSWER_SLACK_S: Final = 2.0

_OLDEST: Final = 140_000
"""The first version of PostgreSQL that this is tested with, as it gives its own."""

_LOCK: Final = 0x53535253
"""What replicas lock that change the tables at once."""

_SECRET_BYTES: Final = 32


def migrate(connection: PostgresConnection, place: str) -> bytes:
    """Bring the tables to this version, those of a new store too, and return the secret of the
    store: random bytes that live as long as it does. Replicas may call it at once. Raises
    StoreUnusable, psycopg.Error."""
    _check_server(connection, place)
    # Longer than PostgreSQL allows for each statement, so that its error says what it was.
    answering = connection.answering(math.inf, answer_s=MIGRATION_WAIT_S + _ANSWER_SLACK_S)
    with answering, connection.transaction():
        for name in ("lock_timeout", "statement_timeout"):
            connection.execute(f"SET LOCAL {name} = '{MIGRATION_WAIT_S}s'")
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        version = _version(connection, place)
        if version < SCHEMA_VERSION:
            for statements in VERSIONS[version:]:
                connection.execute(statements)
            _put_fact(connection, "version", b"%d" % SCHEMA_VERSION)
        if version == 0:
            _put_fact(connection, "secret", secrets.token_bytes(_SECRET_BYTES))
        secret = _fact(connection, "secret")
        num_wrong = holdings.set_right(connection)
    if num_wrong and version == SCHEMA_VERSION:
        told = "--store %s: what %d owners have was not counted right, and is now"
        _logger.warning(told, place, num_wrong)
    if secret is None:
        raise StoreUnusable(f"--store {place} has lost its secret: restore a backup")
    return secret


def _check_server(connection: PostgresConnection, place: str) -> None:
    info = connection.info
    if info.server_version < _OLDEST:
        raise StoreUnusable(
            f"--store {place}: PostgreSQL {info.server_version // 10_000} is older than "
            f"{_OLDEST // 10_000}: upgrade it"
        )
    encoding = info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise StoreUnusable(
            f"--store {place}: texts there are {encoding}: pass a database that was made with "
            "createdb --template template0 --encoding UTF8"
        )
    if info.parameter_status("in_hot_standby") == "on":
        raise StoreUnusable(
            f"--store {place}: this PostgreSQL is a standby: have the URL name the primary"
        )


def _version(connection: PostgresConnection, place: str) -> int:
    """Return the version of the tables, 0 where there are none. Raises StoreUnusable."""
    query = "SELECT count(*) FROM pg_namespace WHERE nspname = %s"
    if not _count(connection, query, SCHEMA):
        connection.execute(f"CREATE SCHEMA {SCHEMA}")
        return 0
    query = "SELECT count(*) FROM pg_class WHERE relnamespace = %s::regnamespace"
    if not _count(connection, query, SCHEMA):
        return 0
    try:
        with connection.transaction():  # one that fails leaves the transaction around it alive
            version = int(_fact(connection, "version") or b"0")
    except (errors.UndefinedTable, errors.UndefinedColumn, errors.DatatypeMismatch, ValueError):
        version = 0
    if version > SCHEMA_VERSION:
        raise StoreUnusable(
            f"--store {place} is of version {version}, and this server knows {SCHEMA_VERSION}: "
            "start the version that wrote it, or pass another --store"
        )
    if version == 0:
        raise StoreUnusable(
            f"--store {place}: its schema {SCHEMA} has tables that no server made: pass another "
            "database"
        )
    return version


def _count(connection: PostgresConnection, query: str, name: str) -> int:
    row = connection.execute(query, (name,)).fetchone()
    return 0 if row is None else int(row[0])


def _fact(connection: PostgresConnection, name: str) -> bytes | None:
    # By its whole name: a schema that this user may not use is left out of the search path.
    query = f"SELECT value FROM {SCHEMA}.facts WHERE name = %s"  # noqa: S608
    row = connection.execute(query, (name,)).fetchone()
    return None if row is None else bytes(row[0])


def _put_fact(connection: PostgresConnection, name: str, value: bytes) -> None:
    query = (
        "INSERT INTO facts VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value"
    )
    connection.execute(query, (name, value))
