"""The log (WAL) that SQLite keeps beside a database: how long it is, and what of it counts.

A log is begun again from the front once all of it is in the database; what lies behind is of an
earlier one, and has other salts.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

LOG_HEADER_BYTES: Final = 32
FRAME_HEADER_BYTES: Final = 24

MAX_LOG_BYTES: Final = 16 << 20
"""Of a log behind a commit: a longer one is emptied, unless somebody reads what it has."""


def log_of(path: Path) -> Path:
    """Return the path of the log of a database."""
    return path.with_name(f"{path.name}-wal")


def index_of(path: Path) -> Path:
    """Return the path of the index of that log, by which those who have the database open agree."""
    return path.with_name(f"{path.name}-shm")


def size_of(path: Path) -> int:
    """Return the bytes of a file, 0 if there is none. Raises OSError."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def frames_bytes(num_frames: int, page_bytes: int) -> int:
    """Return the bytes of a log with so many frames; one without any may be empty."""
    num_bytes = LOG_HEADER_BYTES + num_frames * (FRAME_HEADER_BYTES + page_bytes)
    return num_bytes if num_frames else 0


class Frame(NamedTuple):
    """Describe a page in a log. `end`: where it ends there. `is_current`: it is not of a log before
    this one. `is_commit`: with it a commit ends."""

    page: int
    end: int
    is_current: bool
    is_commit: bool


def frames(log: Path) -> Iterator[Frame]:
    """Yield the pages that a log has, in order. Raises OSError."""
    if not log.exists():
        return
    with log.open("rb") as file:
        header = file.read(LOG_HEADER_BYTES)
        page_bytes, salts = int.from_bytes(header[8:12], "big"), header[16:24]
        while len(frame := file.read(FRAME_HEADER_BYTES)) == FRAME_HEADER_BYTES:
            file.seek(page_bytes, os.SEEK_CUR)
            # A commit says there how many pages the database has.
            page, is_commit = int.from_bytes(frame[:4], "big"), any(frame[4:8])
            yield Frame(page, file.tell(), frame[8:16] == salts, is_commit)


def committed_bytes(log: Path) -> int:
    """Return how many bytes of a log SQLite may read again: up to its last commit. Raises
    OSError."""
    current = takewhile(lambda frame: frame.is_current, frames(log))
    return max((frame.end for frame in current if frame.is_commit), default=0)


def shorten(database: sqlite3.Connection, path: Path, *, is_long: bool) -> bool:
    """Empty the log of a database, `is_long`: one that has grown long, and wait for nobody who
    reads it: then the next commit is for it. Return whether it is empty. Raises OSError,
    sqlite3.Error."""
    num_bytes = size_of(log_of(path))
    if num_bytes <= (MAX_LOG_BYTES if is_long else 0):
        return num_bytes == 0
    (wait_ms,) = database.execute("PRAGMA busy_timeout").fetchone()
    database.execute("PRAGMA busy_timeout = 0")
    try:
        ((is_busy, *_),) = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        with contextlib.suppress(sqlite3.Error):
            database.execute(f"PRAGMA busy_timeout = {wait_ms}")
    return not is_busy
