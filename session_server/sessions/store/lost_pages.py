"""Find out whether all pages of a SQLite database are there: in its file, or in the log beside it.

SQLite looks at a page when somebody asks for it, and trusts the log about how many there are.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

_LOG_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24


def log_of(path: Path) -> Path:
    """Return the path of the log (WAL) that SQLite keeps beside a database."""
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
    num_bytes = _LOG_HEADER_BYTES + num_frames * (_FRAME_HEADER_BYTES + page_bytes)
    return num_bytes if num_frames else 0


def check_pages(database: sqlite3.Connection, path: Path) -> None:
    """Check that each page of the database at `path` is in the file or in its log.

    Raises:
        sqlite3.DatabaseError: some are in neither.
    """
    (num_pages,) = database.execute("PRAGMA page_count").fetchone()
    (page_bytes,) = database.execute("PRAGMA page_size").fetchone()
    logged = frozenset[int]()
    if size_of(path) < num_pages * page_bytes:
        logged = _logged_pages(log_of(path), page_bytes)
    # The file is measured behind its log: a server may move pages from there meanwhile.
    first_not_in_file = size_of(path) // page_bytes + 1
    num_lost = sum(page not in logged for page in range(first_not_in_file, num_pages + 1))
    if num_lost:
        raise sqlite3.DatabaseError(f"{num_lost:,} of its {num_pages:,} pages are missing")


def _logged_pages(log: Path, page_bytes: int) -> frozenset[int]:
    """Return the numbers of the pages that a log has."""
    if not log.exists():
        return frozenset()
    pages = set[int]()
    with log.open("rb") as file:
        file.seek(_LOG_HEADER_BYTES)
        while len(header := file.read(_FRAME_HEADER_BYTES)) == _FRAME_HEADER_BYTES:
            pages.add(int.from_bytes(header[:4], "big"))
            file.seek(page_bytes, os.SEEK_CUR)
    return frozenset(pages)
