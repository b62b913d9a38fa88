"""`TurnNames`: whose the turns and drafts are that the engine was sent last."""

from __future__ import annotations

from typing import Final, NamedTuple

from session_server.core.ids import SessionId, TurnId

MAX_NAMED_TURNS: Final = 1024
"""Turns and drafts that were sent to the engine and are remembered, whether they have ended."""


class TurnName(NamedTuple):
    """Name a turn: its session by the engine's id, and its client's id for it. `is_draft`: it is
    not a turn but input that may become one."""

    session_id: SessionId
    turn_id: str
    is_draft: bool


class TurnNames:
    """Remember the last names by the ids that the engine uses."""

    def __init__(self) -> None:
        self._names: dict[TurnId, TurnName] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, engine_id: TurnId, name: TurnName) -> None:
        """Remember one more, and forget the oldest one where they are too many."""
        self._names[engine_id] = name
        if len(self._names) > MAX_NAMED_TURNS:
            del self._names[next(iter(self._names))]

    def find(self, engine_id: TurnId) -> TurnName | None:
        """Return whose it is; None for one that was forgotten. What is looked for is kept longer
        than what is not, so a turn that runs for long is found as long as somebody looks."""
        name = self._names.pop(engine_id, None)
        if name is not None:
            self._names[engine_id] = name
        return name
