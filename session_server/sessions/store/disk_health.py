"""Say what is wrong with the disk of a store, and how long it counts as failing."""

from __future__ import annotations

import logging
import math
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from session_server.core.kv_place import KV_DIRECTORY
from session_server.core.os_errors import NO_ROOM, in_words, user_name

_logger: Final = logging.getLogger("session_server.store")

QUIET_S: Final = 60.0
"""Seconds between two errors of a kind in the log, and for which a disk counts as failing that
could not be read: nobody may ask for the same place again."""

_FULL_BYTES: Final = 1 << 20
"""Bytes on a disk below which SQLite may be unable to make its files. It says nothing of room then.
"""

_PRIMARY: Final = 0xFF
"""Part of an error code of SQLite that says its kind."""


def is_of_disk(error: Exception) -> bool:
    """Return whether a write failed for the disk, or for want of memory, and not for what it was to
    write."""
    # Others that are derived from this one say that a statement is wrong, or its values.
    is_damaged = type(error) is sqlite3.DatabaseError
    return is_damaged or isinstance(error, (OSError, MemoryError, sqlite3.OperationalError))


def explain(error: Exception, directory: Path) -> str:
    """Return what an error of a store says, and of its disk how much room there is and what to
    do, or who has no permission."""
    if isinstance(error, PermissionError):
        return f"{in_words(error)} for user {user_name()}"
    code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY
    is_full = code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in NO_ROOM
    if not is_full and code not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return in_words(error)
    try:
        free_bytes = shutil.disk_usage(directory).free
    except OSError:
        return in_words(error)
    is_full |= free_bytes < _FULL_BYTES
    said = "" if "full" in str(error) or not is_full else "; the disk is full"
    kv = directory / KV_DIRECTORY
    room = "make room" + (f" (all of {kv} may go at any time)" if kv.is_dir() else "")
    advice = room if is_full else "a quota may be full, or the device fails"
    return f"{in_words(error)}{said} ({free_bytes:,} bytes free): {advice}"


class DiskHealth:
    """Know whether the disk of a store, or its database, can be read and written. `place`: where
    that is; `explain` says what an error means; `clock` returns monotonic seconds."""

    def __init__(
        self,
        place: str,
        explain: Callable[[Exception], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place, self._explain = place, explain
        self._clock = clock
        self.unwritten: str | None = None
        """Why the last write failed; None if it did not."""

        self._unread: str | None = None
        self._unread_s = self._read_logged_s = self._write_logged_s = -math.inf
        self._is_told = False
        """Whether the log says last that it cannot be written to."""

    @property
    def failure(self) -> str | None:
        """Return why the last commit failed, or else a read within `QUIET_S`; None if none did."""
        is_unread = self._clock() < self._unread_s + QUIET_S
        return self.unwritten or (self._unread if is_unread else None)

    def note_write(self, error: Exception | None) -> None:
        """Note how a write has ended, and log where that has changed: while a disk is full, small
        writes still find room now and then."""
        self.unwritten = None if error is None else self._explain(error)
        if self.unwritten is None:
            if self._is_told:
                _logger.warning("the store in %s can be written to again", self._place)
            self._is_told = False
        elif not self._is_told and self._clock() >= self._write_logged_s + QUIET_S:
            self._is_told, self._write_logged_s = True, self._clock()
            told = "the store in %s cannot be written to, and turns are not durable: %s"
            _logger.error(told, self._place, self.unwritten)

    def note_unread(self, error: Exception) -> None:
        """Note that something could not be read, and log it."""
        self._unread, self._unread_s = self._explain(error), self._clock()
        if self._unread_s >= self._read_logged_s + QUIET_S:
            self._read_logged_s = self._unread_s
            _logger.error("the store in %s cannot be read: %s", self._place, self._unread)
