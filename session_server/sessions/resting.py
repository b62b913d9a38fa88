"""Keep sessions at rest that a surface has opened for its clients, until there is no room.

Only those are kept that nobody else has used: a session that somebody knows by its id is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from session_server.core.owner import Owner
from session_server.sessions.manager import SessionManager
from session_server.sessions.views import SessionView

MAX_RESTING: Final = 64
"""Sessions of one owner that rest, of one surface; the oldest closes."""

CountReaders = Callable[[Owner, str], int]
"""How many readers a session of an owner has."""


@dataclass(slots=True)
class RestingSessions:
    """Hold sessions at rest, the one unused for longest first, and close them to make room.

    `on_taken`: told of each that rests no longer.
    """

    manager: SessionManager
    count_readers: CountReaders
    on_taken: Callable[[Owner, str], None] = lambda _owner, _session_id: None
    _left: dict[Owner, dict[str, tuple[str, int]]] = field(default_factory=dict)
    """By owner and id: the epoch and the number of uses when it was left."""

    def __post_init__(self) -> None:
        self.manager.edits.parts.quotas.room_makers.close.append(self._make_room)

    def of(self, owner: Owner) -> list[str]:
        """Return the sessions of an owner that rest."""
        return list(self._left.get(owner, ()))

    def leave(self, owner: Owner, session_id: str, *, num_uses: int) -> bool:
        """Let a session rest, if no turn runs in it and nobody has used it more often than this;
        return whether it does."""
        view = idle_view(self.manager, owner, session_id)
        if view is None or view.num_uses > num_uses:
            return False
        self._left.setdefault(owner, {})[session_id] = view.epoch, view.num_uses
        for oldest in self.of(owner):
            # Of those that have left the memory none is closed: they are forgotten.
            if len(self._left.get(owner, ())) <= MAX_RESTING:
                break
            self.close(owner, [oldest])
        return True

    def take(self, owner: Owner, session_id: str) -> None:
        """Stop to spare a session, if it rests: it is about to be used."""
        left = self._left.get(owner, {})
        if left.pop(session_id, None) is not None:
            if not left:
                del self._left[owner]
            self.on_taken(owner, session_id)

    def take_unused(self, owner: Owner, session_ids: Iterable[str]) -> str | None:
        """Take the first of these that is as it was left and that nobody reads; forget those that
        somebody has used."""
        for session_id in session_ids:
            if not self.is_unused(owner, session_id):
                self.take(owner, session_id)
            elif not self.count_readers(owner, session_id):
                self.take(owner, session_id)
                return session_id
        return None

    def close(self, owner: Owner, session_ids: Iterable[str]) -> bool:
        """Close the first of these that rests unused; return whether there was one."""
        session_id = self.take_unused(owner, session_ids)
        if session_id is not None:
            self.manager.close(owner, session_id)
        return session_id is not None

    def close_all(self, owner: Owner) -> None:
        """Close the sessions of an owner that rest unused, and forget the others."""
        while self._close_first(owner):
            pass

    def is_unused(self, owner: Owner, session_id: str) -> bool:
        """Return whether a session rests as it was left."""
        left = self._left.get(owner, {}).get(session_id)
        view = idle_view(self.manager, owner, session_id)
        return view is not None and (view.epoch, view.num_uses) == left

    def _make_room(self, owner: Owner, *, of_others: bool) -> bool:
        """Close a session, of this owner or else of another; return whether there was one."""
        others = list(self._left) if of_others else ()
        return any(map(self._close_first, [owner, *others]))

    def _close_first(self, owner: Owner) -> bool:
        return self.close(owner, self.of(owner))


def idle_view(manager: SessionManager, owner: Owner, session_id: str) -> SessionView | None:
    """Return a session that is open, in memory, and in which no turn runs or waits; None for any
    other."""
    session = manager.edits.parts.sessions.find(owner, session_id)
    if session is None or session.closing is not None or not session.is_idle:
        return None
    return session.view()
