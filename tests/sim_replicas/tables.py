"""What a simulated database has: rows of sessions with their holders, entries, and records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from session_server.sessions.store.records import RecordRow, SessionRow


class HeldRow(NamedTuple):
    """Hold a session and the id of the replica that holds it, None for nobody's."""

    row: SessionRow
    holder: int | None


class Change(NamedTuple):
    """Say what one write of a transaction did to a session: by whom, in which epoch, and which
    entries it wrote (`is_whole`: in place of all others)."""

    number: int
    name: str
    epoch: int
    replica_id: int
    entries: tuple[bytes, ...]
    is_whole: bool


@dataclass(slots=True)
class Tables:
    """Hold all rows as of one commit. Values are never changed in place."""

    sessions: dict[int, HeldRow] = field(default_factory=dict)
    entries: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    records: dict[int, RecordRow] = field(default_factory=dict)
    parts: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def copy(self) -> Tables:
        """Return tables that a transaction may change."""
        return Tables(dict(self.sessions), dict(self.entries), dict(self.records), dict(self.parts))

    def named(self, owner_id: str, session_id: str) -> HeldRow | None:
        """Return a session by its owner and id."""
        for held in self.sessions.values():
            if held.row.session_id == session_id and held.row.owner_id == owner_id:
                return held
        return None
