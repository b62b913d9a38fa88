"""Open a store in a database that several servers share, if what connects to one is installed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from session_server.config import Settings
from session_server.sessions.store.lease import ReplicaLease
from session_server.sessions.store.lock import StoreAway, StoreUnusable
from session_server.sessions.store.session_store import SessionStore

if TYPE_CHECKING:
    from session_server.sessions.postgres.database import PostgresDatabase
    from session_server.sessions.store.database import Durability

_logger: Final = logging.getLogger("session_server.store")

START_WAIT_S: Final = 60.0
"""How long a server that starts waits for a database that cannot be reached: both may start at the
same time."""

_LOOK_S: Final = 1.0


async def open_once_there(settings: Settings, url: str, *, model: bytes) -> SessionStore:
    """Return the store at a URL as `open_shared` does, also of a database that is there a little
    later. Raises StoreUnusable."""
    until_s, told = time.monotonic() + START_WAIT_S, ""
    while True:
        try:
            return await asyncio.to_thread(open_shared, settings, url, model=model)
        except StoreAway as away:
            if time.monotonic() >= until_s:
                raise
            if str(away) != told:
                told = str(away)
                _logger.warning("the start waits up to %.0f s for it: %s", START_WAIT_S, away)
            await asyncio.sleep(_LOOK_S)


def open_shared(settings: Settings, url: str, *, model: bytes) -> SessionStore:
    """Return the store at a URL, in which this server takes part from now on.

    Raises:
        StoreUnusable: it cannot be used; the message says what to do. StoreAway: or reached now.
    """
    durability = settings.sessions.durability
    database = _connect(url, durability)
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


def check_shared(url: str) -> None:
    """Refuse a database that servers could not keep sessions in; one that is only away they wait
    for. Raises StoreUnusable."""
    with contextlib.suppress(StoreAway):
        _connect(url, "turn").close()


def _connect(url: str, durability: Durability) -> PostgresDatabase:
    try:
        from session_server.sessions.postgres.database import PostgresDatabase
    except ImportError as error:
        raise StoreUnusable(
            "--store names a database of PostgreSQL, and psycopg is not installed: "
            "pip install 'session-server[postgres]'"
        ) from error
    return PostgresDatabase(url, durability=durability)
