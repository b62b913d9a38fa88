"""Delete a session in SQLite, a long one in parts, so that no write waits for all of it."""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

RENAMED: Final = "id = id || '/' || number"
"""What frees the id of a session: no id that a client may choose has this character."""

DELETED_ENTRIES: Final = 64
"""Entries of a session that one write deletes."""

DELETED_BYTES: Final = 1 << 18
"""Bytes of entries that one write deletes; a single entry may exceed it."""


class Freed(NamedTuple):
    """Say what was deleted of a session: so many bytes of its owner's, and whether it `is_gone`.
    `num_retired`: the bytes of it that were kept until then for the sake of its tokens."""

    owner_id: str
    num_bytes: int
    num_retired: int
    is_gone: bool


def delete_some(database: sqlite3.Connection, number: int) -> Freed | None:
    """Delete a session, or the last entries of a long one, which is hidden from then on and frees
    its id; None if it is not there."""
    query = "SELECT owner, num_bytes, length(settings), expires FROM sessions WHERE number = ?"
    found = database.execute(query, (number,)).fetchone()
    if found is None:
        return None
    owner_id, total, num_row_bytes, expires_s = found
    num_retired = total if expires_s == 0 else 0
    start, num_bytes = _last_entries(database, number)
    if start == 0:
        database.execute("DELETE FROM sessions WHERE number = ?", (number,))
        return Freed(owner_id, total + num_row_bytes, num_retired, is_gone=True)
    query = "DELETE FROM entries WHERE session = ? AND position >= ?"
    database.execute(query, (number, start))
    hidden = "" if expires_s < 0 else f"{RENAMED}, expires = -1, "
    database.execute(
        f"UPDATE sessions SET {hidden}num_entries = ?, num_bytes = ? WHERE number = ?",  # noqa: S608
        (start, total - num_bytes, number),
    )
    return Freed(owner_id, num_bytes, num_retired, is_gone=False)


def _last_entries(database: sqlite3.Connection, number: int) -> tuple[int, int]:
    """Return the position from which on one write deletes the entries of a session, and their
    bytes."""
    query = (
        "SELECT position, length(entry) FROM entries WHERE session = ?"
        " ORDER BY position DESC LIMIT ?"
    )
    start, total = 0, 0
    for position, num_bytes in database.execute(query, (number, DELETED_ENTRIES)).fetchall():
        if total and total + num_bytes > DELETED_BYTES:
            break
        start, total = position, total + num_bytes
    return start, total
