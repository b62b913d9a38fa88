"""Track requests that can be aborted by the rid their client chose."""

from __future__ import annotations

from session_server.core.owner import Owner


class RunningRequests:
    """Map the rids that run now, per owner; the server's turn limit bounds them."""

    def __init__(self) -> None:
        self._running: dict[tuple[Owner, str], tuple[str, str]] = {}

    def add(self, owner: Owner, rid: str, turn: tuple[str, str]) -> None:
        """Make a turn (session id, turn id) abortable by `rid`. The newest turn of a rid wins."""
        self._running[owner, rid] = turn

    def remove(self, owner: Owner, rid: str, turn: tuple[str, str]) -> None:
        """Forget a turn that has ended or lost its reader."""
        if self._running.get((owner, rid)) == turn:
            del self._running[owner, rid]

    def turns_of(self, owner: Owner, rid: str | None) -> list[tuple[str, str]]:
        """Return (session id, turn id) of one rid, or of all the owner's turns if it is None."""
        if rid is not None:
            return [self._running[owner, rid]] if (owner, rid) in self._running else []
        return [turn for (its_owner, _), turn in self._running.items() if its_owner == owner]
