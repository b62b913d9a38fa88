"""Connect to PostgreSQL so that nothing waits for ever."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool

SCHEMA: Final = "session_server"
"""Where all tables are: a database may have others."""

CONNECT_TIMEOUT_S: Final = 5
"""For each address of the server. The URL may say another one, as of all that libpq knows."""

UNANSWERED_TIMEOUT_S: Final = 10
"""How long what was sent may stay unacknowledged: a network that drops everything tells nobody. As
long as a statement may take, so that neither hides the other."""

ANSWER_TIMEOUT_S: Final = 12
"""How long an answer may take before the connection is given up: longer than a statement may. What
stands between here and PostgreSQL may acknowledge what it does not pass on."""

STATEMENT_TIMEOUT_S: Final = 10
"""For one statement or commit: longer than a disk takes that still works."""

LOCK_WAIT_S: Final = 8
"""How long a statement waits for another transaction. Longer than `IDLE_TIMEOUT_S`, so that one
whose server has hung is over first, and shorter than a statement may take, so that the error says
what it was."""

ANSWER_WAIT_S: Final = 15.0
"""How long a read waits for its answer, whatever PostgreSQL does: longer than a statement may take,
which says why it has failed."""

COMMIT_WAIT_S: Final = 30.0
"""As `ANSWER_WAIT_S`, for a transaction with all that it writes and its commit, which PostgreSQL
does not bound: it may wait for a standby."""

IDLE_TIMEOUT_S: Final = 5
"""How long a transaction may do nothing before PostgreSQL ends it. One that waits in a server that
has hung holds up whoever takes over its sessions for no more than that."""

MAX_READERS: Final = 4
"""Connections that read, and as many threads of this process as read at a time."""

READ_WAIT_S: Final = 5.0
"""How long a read waits for one of these connections."""

_RECONNECT_S: Final = 1.0
"""How long the pool tries to connect by itself; after that whoever reads next has it try again."""

_DEFAULTS: Final[dict[str, Any]] = {
    "application_name": "session-server",
    "client_encoding": "utf8",
    "connect_timeout": CONNECT_TIMEOUT_S,
    "tcp_user_timeout": UNANSWERED_TIMEOUT_S * 1000,
    # A connection on which nothing is sent, but an answer awaited: also given up after 10 s.
    "keepalives": 1,
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}

_T = TypeVar("_T")


class PostgresConnection(psycopg.Connection[tuple[Any, ...]]):
    """Give up a connection over which no answer comes, so that nothing waits for it for ever.

    PostgreSQL bounds its statements itself, but not its commits: one that waits for a standby waits
    for ever, and so does whoever has asked a server that is frozen, while its system goes on to
    acknowledge what is sent.
    """

    _until_s = math.inf
    _answer_s: float | None = None

    @contextlib.contextmanager
    def answering(self, until_s: float, *, answer_s: float | None = None) -> Iterator[None]:
        """Have all that is asked in this block answered until a time, in monotonic seconds; what
        waits then fails as if the network had broken: with psycopg.OperationalError. `answer_s`:
        how long one answer may take, instead of `ANSWER_TIMEOUT_S`."""
        self._until_s, self._answer_s = until_s, answer_s
        try:
            yield
        finally:
            self._until_s, self._answer_s = math.inf, None

    def wait(self, gen: PQGen[_T], *args: Any, **kwargs: Any) -> _T:
        """Wait as psycopg does, for no longer than `ANSWER_TIMEOUT_S` or `answering` allows. Raises
        psycopg.OperationalError then, and closes the connection."""
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, gen: PQGen[_T]) -> PQGen[_T]:
        answer_s = ANSWER_TIMEOUT_S if self._answer_s is None else self._answer_s
        until_s = min(self._until_s, time.monotonic() + answer_s)
        try:
            state = next(gen)
            while True:
                ready = yield state
                if time.monotonic() > until_s:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("no answer in time")
                state = gen.send(ready)
        except StopIteration as done:
            answer: _T = done.value
            return answer


def whole(url: str) -> str:
    """Return a URL, or a connection string of libpq, with all that it leaves open. Raises
    psycopg.ProgrammingError, whose text may have the password."""
    return make_conninfo(**_DEFAULTS | conninfo_to_dict(url))


def shown(url: str) -> str:
    """Return where a URL leads, without who connects and how. Raises psycopg.ProgrammingError, as
    `whole`."""
    given = conninfo_to_dict(url)
    host = given.get("host") or given.get("hostaddr") or "localhost"
    port = f":{given['port']}" if "port" in given else ""
    return f"postgresql://{host}{port}/{given.get('dbname', '')}"


def connect(conninfo: str, *, is_synced: bool = True) -> PostgresConnection:
    """Connect, with autocommit. With one that `is_synced` a commit waits until it outlives the
    server of the database. Raises psycopg.Error."""
    connection = PostgresConnection.connect(conninfo, autocommit=True)
    try:
        configure(connection, is_synced=is_synced)
    except BaseException:
        connection.close()
        raise
    return connection


def configure(connection: PostgresConnection, *, is_synced: bool = True) -> None:
    """Have a connection behave as this package expects, whatever is the default of the server, the
    database or the role."""
    # Who waits for more than one disk is not made to wait for less.
    synced = "CASE synced WHEN 'remote_apply' THEN synced ELSE 'on' END"
    chosen = {
        "search_path": f"'{SCHEMA}'",
        "default_transaction_isolation": "'read committed'",  # a lock is looked behind anew
        "statement_timeout": f"'{STATEMENT_TIMEOUT_S}s'",
        "lock_timeout": f"'{LOCK_WAIT_S}s'",
        "idle_in_transaction_session_timeout": f"'{IDLE_TIMEOUT_S}s'",
        "synchronous_commit": synced if is_synced else "'off'",
    }
    settings = ", ".join(f"set_config('{name}', {value}, false)" for name, value in chosen.items())
    connection.execute(f"SELECT {settings} FROM current_setting('synchronous_commit') AS synced")  # noqa: S608


class KeptConnection:
    """Keep a connection that no read keeps busy, for one thread at a time, and make it anew once it
    has failed. `begin`: what is said first over each. Any thread may `close`."""

    def __init__(self, conninfo: str, begin: str = "SELECT") -> None:
        self._conninfo, self._begin = conninfo, begin
        self._using = threading.Lock()
        self._connection: PostgresConnection | None = None
        self.is_closed = False

    @contextlib.contextmanager
    def lent(self) -> Iterator[PostgresConnection]:
        """Lend the connection. One over which the block has raised is closed. Raises
        psycopg.Error."""
        try:
            with self._using:
                is_whole = False
                try:
                    if self._connection is None:
                        self._connection = connect(self._conninfo)
                        self._connection.execute(self._begin)
                    yield self._connection
                    is_whole = True
                finally:
                    if not is_whole:
                        self._disconnect()
        finally:
            if self.is_closed:
                self.close()

    def close(self) -> None:
        """Close it. Waits for nothing: whoever uses it closes it then."""
        self.is_closed = True
        if self._using.acquire(blocking=False):
            self._disconnect()
            self._using.release()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def open_pool(conninfo: str) -> ConnectionPool[PostgresConnection]:
    """Return connections to read over. It connects when one is asked for. Raises nothing."""
    return ConnectionPool(
        conninfo,
        connection_class=PostgresConnection,
        kwargs={"autocommit": True},
        min_size=1,
        max_size=MAX_READERS,
        open=True,
        configure=configure,
        timeout=READ_WAIT_S,
        reconnect_timeout=_RECONNECT_S,
        num_workers=1,
        name="store-readers",
    )
