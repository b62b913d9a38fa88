"""Connect to the database of a store."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

_BUSY_S: Final = 1.0
"""How long a statement waits for whoever else has locked the database."""


def connect(place: Path | str) -> sqlite3.Connection:
    """Open a database at a path, or at a URI that says how. Raises sqlite3.Error."""
    # Whoever opens it uses it on another thread; each connection is used by one at a time.
    is_uri = isinstance(place, str)
    return sqlite3.connect(
        place, timeout=_BUSY_S, isolation_level=None, check_same_thread=False, uri=is_uri
    )
