"""`UseOrder`: the sessions of a store that are in memory, the one unused for longest first."""

from __future__ import annotations

from collections import OrderedDict

from session_server.core.owner import Owner
from session_server.sessions.session import Session


class UseOrder:
    """Order sessions by when they were last used, all together and those of each owner.

    `in_hand`: the one that was asked for last, and is about to be changed.
    """

    def __init__(self) -> None:
        self._all: OrderedDict[Session, None] = OrderedDict()
        self._of: dict[Owner, OrderedDict[Session, None]] = {}
        self.in_hand: Session | None = None

    def use(self, session: Session) -> None:
        """Put a session last. Does nothing for one that is not stored."""
        self.in_hand = session
        self.postpone(session)

    def postpone(self, session: Session) -> None:
        """Put a session last that nobody has asked for just now."""
        if session.life.log is None:
            return
        for order in (self._all, self._of.setdefault(session.owner, OrderedDict())):
            order[session] = None
            order.move_to_end(session)

    def remove(self, session: Session) -> None:
        """Remove a session that leaves the memory, if it is here."""
        if session in self._all:
            del self._all[session]
            owned = self._of[session.owner]
            del owned[session]
            if not owned:
                del self._of[session.owner]
        if self.in_hand is session:
            self.in_hand = None

    def first(self, owner: Owner | None) -> Session | None:
        """Return the session of an owner, or of everybody, that was unused for longest; None if
        there is none."""
        order = self._all if owner is None else self._of.get(owner)
        return next(iter(order), None) if order else None

    def num_of(self, owner: Owner | None) -> int:
        """Return how many sessions an owner has here, or everybody."""
        return len(self._all) if owner is None else len(self._of.get(owner, ()))
