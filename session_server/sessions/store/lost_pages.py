"""Find out whether all pages of a SQLite database are there: in its file, or in the log beside it.

SQLite looks at a page when somebody asks for it, and trusts the log about how many there are.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from session_server.sessions.store.log_frames import frames, log_of, size_of


def check_pages(database: sqlite3.Connection, path: Path) -> None:
    """Check that each page of the database at `path` is in the file or in its log.

    Raises:
        sqlite3.DatabaseError: some are in neither.
    """
    (num_pages,) = database.execute("PRAGMA page_count").fetchone()
    (page_bytes,) = database.execute("PRAGMA page_size").fetchone()
    logged = set[int]()
    if size_of(path) < num_pages * page_bytes:
        logged = {frame.page for frame in frames(log_of(path))}
    # The file is measured behind its log: a server may move pages from there meanwhile.
    first_not_in_file = size_of(path) // page_bytes + 1
    num_lost = sum(page not in logged for page in range(first_not_in_file, num_pages + 1))
    if num_lost:
        raise sqlite3.DatabaseError(f"{num_lost:,} of its {num_pages:,} pages are missing")
