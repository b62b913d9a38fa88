"""Open a store in a database that several servers share, if what connects to one is installed."""

from __future__ import annotations

import logging
from typing import Final

from session_server.config import Settings
from session_server.sessions.store.lease import ReplicaLease
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.session_store import SessionStore

_logger: Final = logging.getLogger("session_server.store")


def open_shared(settings: Settings, url: str, *, model: bytes) -> SessionStore:
    """Return the store at a URL, in which this server takes part from now on. Waits for the
    database.

    Raises:
        StoreUnusable: it cannot be reached or used; the message says what to do.
    """
    try:
        from session_server.sessions.postgres.database import PostgresDatabase
    except ImportError as error:
        raise StoreUnusable(
            "--store names a database of PostgreSQL, and psycopg is not installed: "
            "pip install 'session-server[postgres]'"
        ) from error
    durability = settings.sessions.durability
    database = PostgresDatabase(url, durability=durability)
    sessions = settings.sessions
    lease = ReplicaLease(database, address=sessions.advertise_url, role=sessions.role)
    try:
        lease.join()
        store = SessionStore(
            database, model=model, durability=durability, wall=lease.wall_s, lease=lease
        )
    except database.read_errors as error:
        database.close()
        raise StoreUnusable(f"--store: {database.explain(error)}") from error
    _logger.info("sessions are kept in %s, which others may share", store.place)
    return store
