"""What a shared store has of its sessions, read from its tables: the last word on what was kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import psycopg

from session_server.sessions.store.records import LogEntry, decode_entry

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Ledger:
    """All sessions and entries, in order."""

    sessions: list[Row]
    entries: list[Row]

    @classmethod
    def read(cls, url: str) -> Ledger:
        """Return what is in the database at a URL."""
        with psycopg.connect(url, options="-c search_path=session_server") as connection:
            sessions = connection.execute(
                "SELECT number, id, num_entries, num_bytes, epoch FROM sessions ORDER BY number"
            ).fetchall()
            entries = connection.execute(
                "SELECT session, position, epoch, entry FROM entries ORDER BY session, position"
            ).fetchall()
        return cls(sessions, entries)

    @property
    def num_adoptions(self) -> int:
        """How often a session was taken by a replica that had not made it, or had given it up."""
        return sum(epoch - 1 for *_, epoch in self.sessions)

    def problems(self) -> Iterator[str]:
        """Say what no order of commits of holders of these sessions can have left."""
        by_session = {number: [*rows] for number, rows in groupby(self.entries, lambda row: row[0])}
        for number, name, num_entries, num_bytes, epoch in self.sessions:
            entries = by_session.pop(number, [])
            for problem in _problems_of(entries):
                yield f"{name}: {problem}"
            if len(entries) != num_entries:
                yield f"{name}: {len(entries)} entries are there, of {num_entries}"
            total = sum(len(entry) for *_, entry in entries)
            if total != num_bytes:
                yield f"{name}: {total} bytes are there, of {num_bytes}"
            if entries and entries[-1][2] > epoch:
                yield f"{name}: an entry of epoch {entries[-1][2]} in epoch {epoch}"
        for number in by_session:
            yield f"there are entries of session {number}, which is not there"


def _problems_of(entries: list[Row]) -> Iterator[str]:
    positions = [position for _, position, _, _ in entries]
    if positions != [*range(len(positions))]:
        yield f"positions have a gap: {positions}"
    epochs = [epoch for _, _, epoch, _ in entries]
    if any(later < earlier for earlier, later in pairwise(epochs)):
        yield f"epochs fall: {epochs}"
    ended = set[int]()
    for turn in (turn for each in entries for turn in _decoded(each).turns):
        if turn.key in ended:
            yield f"a turn that had ended ended again: {turn}"
        if turn.kind != "failed":  # one that failed may run again
            ended.add(turn.key)


def _decoded(row: Row) -> LogEntry:
    return decode_entry(bytes(row[3]))
