"""Register open sessions and find them by owner: another owner's session id is unknown. Beside
them stands when each expires."""

from __future__ import annotations

import asyncio
import logging
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from operator import attrgetter
from typing import Final

from session_server.core.errors import InvalidRequest, SessionExists, SessionNotFound
from session_server.core.ids import SessionId
from session_server.core.owner import Owner
from session_server.core.session_events import CloseReason
from session_server.sessions.backlog import SLICE
from session_server.sessions.deadlines import Deadlines
from session_server.sessions.session import Session

_logger: Final = logging.getLogger("session_server.sessions")
_order: Final = attrgetter("life.order")
_NOT_FOUND: Final = "No such session: closed, expired, or opened with another key."
_CURSOR: Final = re.compile(r"~([0-9]{1,20})")
"""The order of a session, marked by a character that no session id has."""


class SessionRegistry:
    """Hold open sessions by (owner, id) and by the id that the engine uses."""

    def __init__(self) -> None:
        self._by_owner: dict[Owner, dict[str, Session]] = {}
        self._by_engine_id: dict[SessionId, Session] = {}
        self._in_order: dict[Owner, list[Session]] = {}
        """The sessions of each owner, oldest first, so that a place is found by bisection."""

        self._last_order = 0
        self.num_opened = 0
        self.num_closed: Counter[CloseReason] = Counter()
        self.deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_engine_id.values()))

    async def in_slices(self) -> AsyncIterator[Session]:
        """Yield every session that is still open; let other work run in between."""
        for number, session in enumerate(self, 1):
            if not session.journal.is_closed:
                yield session
            if number % SLICE == 0:
                await asyncio.sleep(0)

    def add(self, session: Session) -> None:
        """Add a session whose id `check_free` allowed, last in order."""
        self.num_opened += 1
        _logger.debug("session opened session=%s", session.session_id)
        # Microseconds of the wall clock: a plain count would show clients how many others open.
        self._last_order = max(self._last_order + 1, int(session.settings.created_s * 1e6))
        session.life.order = self._last_order
        self._by_owner.setdefault(session.owner, {})[session.session_id] = session
        self._in_order.setdefault(session.owner, []).append(session)
        self._by_engine_id[session.copy.session_id] = session

    def remove(self, session: Session, reason: CloseReason) -> None:
        """Remove a session that was closed for a reason; its id is free again."""
        self.num_closed[reason] += 1
        _logger.debug("session closed session=%s reason=%s", session.session_id, reason)
        owned, in_order = self._by_owner[session.owner], self._in_order[session.owner]
        del owned[session.session_id]
        del in_order[bisect_left(in_order, session.life.order, key=_order)]
        if not owned:
            del self._by_owner[session.owner], self._in_order[session.owner]
        del self._by_engine_id[session.copy.session_id]

    def check_free(self, owner: Owner, session_id: str) -> None:
        """Raise SessionExists if the owner has an open session with this id."""
        if session_id in self._by_owner.get(owner, {}):
            raise SessionExists("the session id is in use", param="id")

    def get(self, owner: Owner, session_id: str) -> Session:
        """Return an open session; raise SessionNotFound for an unknown id and for another owner's
        alike."""
        session = self._by_owner.get(owner, {}).get(session_id)
        if session is None:
            raise SessionNotFound(_NOT_FOUND)
        return session

    def use(self, owner: Owner, session_id: str) -> Session:
        """Return an open session that is used by its id: from here on it is nobody's to spare.
        Raises SessionNotFound."""
        session = self.get(owner, session_id)
        session.life.num_uses += 1
        return session

    def find_by_engine_id(self, session_id: SessionId) -> Session | None:
        """Return the session that the engine knows by this id, or None."""
        return self._by_engine_id.get(session_id)

    def page(self, owner: Owner, *, limit: int, after: str | None) -> tuple[list[Session], bool]:
        """Return up to `limit` sessions of an owner, oldest first, and whether more follow.

        `after`: a cursor, or the id of an open session. Raises InvalidRequest if it is neither.
        """
        in_order = self._in_order.get(owner, [])
        last = 0 if after is None else _order_of(self._by_owner.get(owner, {}), after)
        start = bisect_right(in_order, last, key=_order)
        return in_order[start : start + limit], start + limit < len(in_order)


def cursor_of(session: Session) -> str:
    """Return the cursor of the sessions after this one. It stays valid when the session closes."""
    return f"~{session.life.order}"


def _order_of(owned: dict[str, Session], after: str) -> int:
    cursor = _CURSOR.fullmatch(after)
    if cursor is not None:
        return int(cursor[1])
    if after not in owned:
        raise InvalidRequest("neither a cursor nor the id of an open session", param="after")
    return owned[after].life.order
