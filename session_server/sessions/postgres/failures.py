"""Say what is wrong with PostgreSQL, in one line and without the password of its URL."""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg import errors
from psycopg_pool import PoolTimeout

from session_server.core.os_errors import in_words
from session_server.sessions.store.lock import StoreAway, StoreUnusable

_OF_MEDIUM: Final = (
    OSError,
    MemoryError,
    psycopg.InterfaceError,
    psycopg.OperationalError,
    errors.DataCorrupted,
    errors.IdleInTransactionSessionTimeout,
    errors.IndexCorrupted,
    errors.InsufficientPrivilege,
    errors.InvalidSchemaName,
    errors.ReadOnlySqlTransaction,
    errors.UndefinedTable,
)
_OF_OTHERS: Final = (errors.DeadlockDetected, errors.SerializationFailure)
_OF_VALUES: Final = "54"
"""The class of errors that psycopg takes for operational and that say a value is too large."""

_ADVICE: Final = (
    (errors.DiskFull, "make room on the disk of PostgreSQL"),
    (errors.InsufficientPrivilege, "grant this user what it needs"),
    (errors.InvalidSchemaName, "somebody has dropped the tables: restore a backup"),
    (errors.LockNotAvailable, "another transaction holds it: see pg_locks"),
    (errors.ReadOnlySqlTransaction, "this PostgreSQL is a standby: have the URL name the primary"),
    (errors.TooManyConnections, "raise max_connections, or run fewer replicas"),
    (PoolTimeout, "it does not answer, or every connection is busy"),
    (errors.UndefinedTable, "somebody has dropped the tables: restore a backup"),
)
_ADVICE_TO_CONNECT: Final = (
    (r'database ".*" does not exist', "make it with createdb"),
    (r"password|authentication|pg_hba|role", "check user and password"),
    (r"too many|remaining connection slots", "raise max_connections, or run fewer replicas"),
)
_SECRETS: Final = re.compile(r"(?<=://)[^@/\s]*@|\b(ssl)?password\s*=\s*('[^']*'|\S+)", re.I)


def is_unavailable(error: Exception) -> bool:
    """Return whether a statement failed for PostgreSQL, the way there, or for want of memory, and
    not for what it was to write."""
    state = getattr(error, "sqlstate", None) or ""
    return isinstance(error, _OF_MEDIUM) and not state.startswith(_OF_VALUES)


def is_passing(error: Exception) -> bool:
    """Return whether PostgreSQL has undone a transaction in favor of another one: it may be tried
    again at once."""
    return isinstance(error, _OF_OTHERS)


def explain(error: Exception) -> str:
    """Return what an error says, and what to do where that is known."""
    if isinstance(error, OSError):
        return in_words(error)
    said = getattr(getattr(error, "diag", None), "message_primary", None) or str(error)
    line = _SECRETS.sub("", "; ".join(filter(None, map(str.strip, said.splitlines()))))
    line = line or type(error).__name__
    advice = next((advice for kind, advice in _ADVICE if isinstance(error, kind)), None)
    return f"{line}: {advice}" if advice else line


def refusal(place: str, error: Exception) -> StoreUnusable:
    """Return what to raise of a database that could not be opened: StoreAway where it may be there
    a little later."""
    said, kind = explain(error), StoreUnusable
    advice = "is PostgreSQL there, and does it listen?"
    if getattr(error, "sqlstate", None) is not None:  # it has answered
        advice = ""
        if isinstance(error, errors.InsufficientPrivilege):
            advice = "GRANT CREATE ON DATABASE ... TO this user, or have it own the tables"
    else:  # what is wrong in connecting is told in words alone
        found = [each for words, each in _ADVICE_TO_CONNECT if re.search(words, said)]
        advice, kind = (found[0], kind) if found else (advice, StoreAway)
    return kind(f"--store {place}: {said}" + (f": {advice}" if advice else ""))
