"""Requests that can be aborted by the name their client gave them."""

from __future__ import annotations

from session_server.core.owner import Owner


class RunningRequests:
    """The rids that run now, per owner; as many as turns the server accepts."""

    def __init__(self) -> None:
        self._running: dict[tuple[Owner, str], tuple[str, str]] = {}

    def add(self, owner: Owner, rid: str, turn: tuple[str, str]) -> None:
        """Be abortable by `rid`; `turn` is (session id, turn id). The newest of a name wins."""
        self._running[owner, rid] = turn

    def remove(self, owner: Owner, rid: str, turn: tuple[str, str]) -> None:
        """The turn has ended, or nobody reads it any more."""
        if self._running.get((owner, rid)) == turn:
            del self._running[owner, rid]

    def turns_of(self, owner: Owner, rid: str | None) -> list[tuple[str, str]]:
        """(session id, turn id) of one rid, or of all the owner's with None."""
        if rid is not None:
            return [self._running[owner, rid]] if (owner, rid) in self._running else []
        return [turn for (its_owner, _), turn in self._running.items() if its_owner == owner]
