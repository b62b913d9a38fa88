"""Look after the files of a store: what they are, who may read them, and whether the names still
lead to those that a server has open.

SQLite goes on writing to a file that nobody can find any more, and says nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import stat
import struct
from pathlib import Path
from typing import Final

from session_server.core.kv_place import KV_DIRECTORY, KV_REFUSED
from session_server.sessions.store.log_frames import frames_bytes, index_of, log_of

_logger: Final = logging.getLogger("session_server.store")

_INDEX_HEADER: Final = struct.Struct("=14xHII")
"""Of an index of a log: the bytes of a page, the frames in the log, and the pages of the database
as of its last commit. https://sqlite.org/walformat.html"""

DATABASE_NAME: Final = "sessions.sqlite3"
LOCK_NAME: Final = "lock"
STORE_NAMES: Final = (
    LOCK_NAME,
    *(f"{DATABASE_NAME}{suffix}" for suffix in ("", "-wal", "-shm", "-journal")),
)
"""Files of a store: where one of them is, somebody has made one."""

_ADVICE: Final = "put them back, or restart the server"
EXPOSED: Final = stat.S_IRWXG | stat.S_IRWXO
"""What of the mode of a file lets other users do anything with it."""

_KINDS: Final = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
}


class LogGone(sqlite3.OperationalError):
    """Report a log that cannot be found any more; what it has is there for who has it open."""


def check_kinds(directory: Path) -> None:
    """Raise OSError if something in a store is not the kind of file that it must be: to open a pipe
    would wait for whoever writes to it."""
    directories = KV_DIRECTORY, f"{KV_DIRECTORY}/{KV_REFUSED}"
    for name in (*STORE_NAMES, *directories):
        path = directory / name
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue  # whoever opens it says so
        kind = _KINDS.get(stat.S_IFMT(mode), "a device or a pipe")
        wanted = "a directory" if name in directories else "a file"
        if kind != wanted:
            raise OSError(f"{path} is {kind}, and must be {wanted}: put one there, or remove it")


def check_readable(directory: Path) -> None:
    """Raise PermissionError if a file of a store may not be read, as who puts a backup there for
    another user may leave it: SQLite only says that it cannot open it."""
    for name in STORE_NAMES:
        path = directory / name
        if path.exists() and not os.access(path, os.R_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def tighten(directory: Path) -> None:
    """Take from others what they may do with the files of a store, as who puts a backup there may
    leave them, and with its directory, if that has nothing else. Raises OSError."""
    own = {*STORE_NAMES, KV_DIRECTORY}
    there = {entry.name for entry in os.scandir(directory)}
    found = [directory / name for name in sorted(own & there)]
    for path in [*found, directory] if there <= own else found:
        status = path.stat()
        if status.st_mode & EXPOSED and status.st_uid == os.geteuid():
            path.chmod(stat.S_IMODE(status.st_mode) & ~EXPOSED)
            _logger.warning("other users could open %s: from now on they cannot", path)


class OpenFiles:
    """Know the files that a database and its log were opened as. `others` belong to them too."""

    def __init__(self, path: Path, *others: Path) -> None:
        """Begin where all of them are open. Raises OSError."""
        self._paths = tuple(map(os.fspath, (path, log_of(path), index_of(path), *others)))
        # SQLite's locks on a file go where any descriptor of it is closed: this one stays open.
        self._index_fd = os.open(index_of(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._found = self._find()
        except OSError:
            os.close(self._index_fd)
            raise

    def close(self) -> None:
        """Let go of the files, once the database is closed."""
        os.close(self._index_fd)

    def check(self) -> None:
        """Raise sqlite3.OperationalError if the names do not lead to the files that were opened, or
        these were cut short: what is written then is lost, or another server's."""
        try:
            found = self._find()
        except OSError as error:
            kind = LogGone if error.filename == self._paths[1] else sqlite3.OperationalError
            raise kind(f"the store's files are gone ({error}): {_ADVICE}") from error
        for path, was, now in zip(self._paths, self._found, found, strict=True):
            if not os.path.samestat(was, now):
                told = f"the store's files were replaced ({path}): {_ADVICE}"
                raise sqlite3.OperationalError(told)
        # Read behind their sizes: a log is short only after its index says so.
        try:
            index = os.pread(self._index_fd, _INDEX_HEADER.size, 0)
            page_bytes, num_frames, num_pages = _INDEX_HEADER.unpack(index)
        except (OSError, struct.error) as error:
            told = f"the index of the store's log cannot be read ({error}): {_ADVICE}"
            raise sqlite3.OperationalError(told) from error
        database, log = found[0].st_size, found[1].st_size
        # Pages that are in the log alone may be missing; of those once in the file, none.
        least = min(self._found[0].st_size, num_pages * page_bytes)
        if database < least or log < frames_bytes(num_frames, page_bytes):
            raise sqlite3.OperationalError(f"the store's files were cut short: {_ADVICE}")
        self._found = found

    def _find(self) -> tuple[os.stat_result, ...]:
        return tuple(os.stat(path) for path in self._paths)
