"""Find out whether all pages of a SQLite database are there: in its file, or in the log beside it.

SQLite looks at a page when somebody asks for it, and trusts the log about how many there are.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from session_server.sessions.store.log_frames import (
    FRAME_HEADER_BYTES,
    LOG_HEADER_BYTES,
    log_of,
    size_of,
)


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
        file.seek(LOG_HEADER_BYTES)
        while len(header := file.read(FRAME_HEADER_BYTES)) == FRAME_HEADER_BYTES:
            pages.add(int.from_bytes(header[:4], "big"))
            file.seek(page_bytes, os.SEEK_CUR)
    return frozenset(pages)
