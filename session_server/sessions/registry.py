"""Register open sessions and find them by owner: another owner's session id is unknown. Beside
them stands when each expires."""

from __future__ import annotations

import asyncio
import logging
import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Protocol

from session_server.core.errors import InvalidRequest, SessionExists, SessionNotFound
from session_server.core.ids import SessionId
from session_server.core.owner import Owner
from session_server.core.session_events import CloseReason
from session_server.sessions.backlog import SLICE
from session_server.sessions.deadlines import Deadlines
from session_server.sessions.place_counter import PlaceCounter
from session_server.sessions.session import Session
from session_server.sessions.store.survey import SurveyQuestion
from session_server.sessions.use_order import UseOrder
from session_server.sessions.views import SessionPage, SessionView, StoredSummary

_logger: Final = logging.getLogger("session_server.sessions")
_order: Final = attrgetter("life.order")
_NOT_FOUND: Final = "No such session: closed, expired, or opened with another key."
_LAST_ORDER: Final = (1 << 63) - 1
_CURSOR: Final = re.compile(r"~([0-9]{1,20})")
"""The order of a session, marked by a character that no session id has."""


class OnDisk(Protocol):
    """Name what a registry asks of the sessions that are on disk and not in memory."""

    def check(self) -> None:
        """Raise SessionMoved if this process may not answer for those that are in memory."""

    def forget(self, session: Session) -> None:
        """Note that a session has left the memory: what was looked up of it is old."""

    def restore(self, owner: Owner, session_id: str) -> Session | None:
        """Return a session, registered, or None if there is none."""

    async def load(self, owner: Owner, session_id: str) -> None:
        """Restore a long session in slices; one of a shared store, long or short."""

    async def look_up(self, owner: Owner, session_id: str) -> None:
        """Find out whether there is a session, before `order_of` is asked for it."""

    async def prepare_close(self, owner: Owner, session_id: str) -> None:
        """Do what has to be awaited before a session is closed by its id."""

    def order_of(self, owner: Owner, session_id: str) -> int | None:
        """Return the place of a session in the order, or None if there is none."""

    async def page(self, owner: Owner, *, limit: int, after: int) -> list[tuple[int, SessionView]]:
        """Return up to `limit` sessions behind a place in the order, with their places."""

    def close(self, owner: Owner, session_id: str) -> SessionView | None:
        """Delete a session, or return None if there is none."""

    async def survey(self, question: SurveyQuestion) -> tuple[list[StoredSummary], int]:
        """Return sessions of all owners, and how many there are of such."""

    async def numbered(self, number: int) -> StoredSummary | None:
        """Return the session of a number, or None if there is none."""

    def spare(self, owner: Owner, session_id: str) -> None:
        """Delete a session that only the surface that opened it has used, if there is one."""

    def expire(self, now_s: float) -> bool:
        """Delete some whose time is over; return whether there may be more to do before the next
        tick, which has another `now_s`."""


@dataclass(slots=True)
class SessionCounts:
    """Count sessions that were opened, those that came from a store or left for it, and those that
    were closed, by reason."""

    opened: int = 0
    loaded: int = 0
    unloaded: int = 0
    closed: Counter[CloseReason] = field(default_factory=Counter)


class SessionRegistry:
    """Hold open sessions by (owner, id) and by the id that the engine uses.

    `on_disk`: those that are stored, which come into memory when they are asked for, until this
    process `is_ending`.
    """

    def __init__(self) -> None:
        self.on_disk: OnDisk | None = None
        self.is_ending = False
        self._by_owner: dict[Owner, dict[str, Session]] = {}
        self._by_engine_id: dict[SessionId, Session] = {}
        self._in_order: dict[Owner, list[Session]] = {}
        """The sessions of each owner, oldest first, so that a place is found by bisection."""

        self._by_order: dict[int, Session] = {}
        self._awaited: dict[Session, asyncio.Event] = {}
        """What is set once a session has left the memory that somebody waits for."""

        self._places = PlaceCounter()
        self.by_use = UseOrder()
        self.counts = SessionCounts()
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

    def number_by(self, places: PlaceCounter) -> None:
        """Give sessions that are opened these places from now on."""
        self._places = places

    def add(self, session: Session) -> None:
        """Add a session whose id `check_free` allowed, last in order."""
        self.counts.opened += 1
        _logger.debug("session opened session=%s", session.session_id)
        session.life.order = self._places.next(session.settings.created_s)
        self._register(session)

    def restored(self, session: Session) -> None:
        """Add a session that is on disk, at the place in the order that it has."""
        self.counts.loaded += 1
        _logger.debug("session restored session=%s", session.session_id)
        self._register(session)

    def _register(self, session: Session) -> None:
        self._by_owner.setdefault(session.owner, {})[session.session_id] = session
        insort(self._in_order.setdefault(session.owner, []), session, key=_order)
        self._by_engine_id[session.copy.session_id] = session
        if self._places.is_shared:
            self._by_order[session.life.order] = session

    def numbered(self, number: int) -> Session | None:
        """Return the session in memory that has this place in the order, or None; in a store that
        others share."""
        return self._by_order.get(number)

    def remove(self, session: Session, reason: CloseReason) -> None:
        """Remove a session that was closed for a reason; its id is free again."""
        self.counts.closed[reason] += 1
        _logger.debug("session closed session=%s reason=%s", session.session_id, reason)
        self._unregister(session)

    def unload(self, session: Session) -> None:
        """Remove a session that stays on disk."""
        self.counts.unloaded += 1
        _logger.debug("session unloaded session=%s", session.session_id)
        self._unregister(session)

    def _unregister(self, session: Session) -> None:
        self.by_use.remove(session)
        owned, in_order = self._by_owner[session.owner], self._in_order[session.owner]
        del owned[session.session_id]
        del in_order[bisect_left(in_order, session.life.order, key=_order)]
        if not owned:
            del self._by_owner[session.owner], self._in_order[session.owner]
        del self._by_engine_id[session.copy.session_id]
        self._by_order.pop(session.life.order, None)
        if self.on_disk is not None:
            self.on_disk.forget(session)
        if (awaited := self._awaited.pop(session, None)) is not None:
            awaited.set()

    async def until_gone(self, session: Session) -> None:
        """Wait until a session has left the memory."""
        if self.find(session.owner, session.session_id) is session:
            await self._awaited.setdefault(session, asyncio.Event()).wait()

    def check_free(self, owner: Owner, session_id: str) -> None:
        """Raise SessionExists if the owner has an open session with this id."""
        if self.order_of(owner, session_id) is not None:
            raise SessionExists("the session id is in use", param="id")

    def find(self, owner: Owner, session_id: str) -> Session | None:
        """Return an open session that is in memory, or None."""
        return self._by_owner.get(owner, {}).get(session_id)

    def order_of(self, owner: Owner, session_id: str) -> int | None:
        """Return the place in the order of an open session, in memory or on disk, or None."""
        session = self.find(owner, session_id)
        if session is not None or self.on_disk is None:
            return None if session is None else session.life.order
        return self.on_disk.order_of(owner, session_id)

    def get(self, owner: Owner, session_id: str) -> Session:
        """Return an open session; raise SessionNotFound for an unknown id and for another owner's
        alike, and for one that is on disk whatever `OnDisk.restore` raises."""
        session = self.find(owner, session_id)
        if session is None and self.on_disk is not None:
            session = self.on_disk.restore(owner, session_id)
        if session is None:
            raise SessionNotFound(_NOT_FOUND)
        if self.on_disk is not None and session.life.log is not None:
            self.on_disk.check()
            if session.is_lost:  # its turn is being cut, and the lease may be another one by now
                session.check_not_closing()
        self.by_use.use(session)
        return session

    async def load(self, owner: Owner, session_id: str) -> None:
        """Bring a long session that is on disk into memory in slices, before it is asked for. Does
        nothing for any other; raises whatever `OnDisk.load` raises."""
        if self.on_disk is not None:
            await self.on_disk.load(owner, session_id)

    async def look_up(self, owner: Owner, session_id: str) -> None:
        """Find out whether a session exists, before `check_free` is asked. Raises ServerBusy."""
        if self.on_disk is not None:
            await self.on_disk.look_up(owner, session_id)

    async def prepare_close(self, owner: Owner, session_id: str) -> None:
        """Do what has to be awaited before a session is closed by its id. Raises whatever
        `OnDisk.prepare_close` raises."""
        if self.on_disk is not None:
            await self.on_disk.prepare_close(owner, session_id)

    def use(self, owner: Owner, session_id: str) -> Session:
        """Return an open session that is used by its id: from here on it is nobody's to spare.
        Raises SessionNotFound."""
        session = self.get(owner, session_id)
        session.life.num_uses += 1
        return session

    def find_by_engine_id(self, session_id: SessionId) -> Session | None:
        """Return the session that the engine knows by this id, or None."""
        return self._by_engine_id.get(session_id)

    async def page(self, owner: Owner, *, limit: int, after: str | None) -> SessionPage:
        """Return up to `limit` sessions of an owner, oldest first.

        `after`: a cursor, or the id of an open session. Raises InvalidRequest if it is neither.
        """
        if after is not None and _CURSOR.fullmatch(after) is None:
            await self.look_up(owner, after)
        last = self._order_of(owner, after)
        on_disk = list[tuple[int, SessionView]]()
        if self.on_disk is not None:
            on_disk = await self.on_disk.page(owner, limit=limit + 1, after=last)
        # As it is now, whatever has come into memory or left it meanwhile.
        in_order = self._in_order.get(owner, [])
        start = bisect_right(in_order, last, key=_order)
        in_memory = [each for each in in_order[start : start + limit + 1] if not each.is_lost]
        views = dict(on_disk) | {session.life.order: session.view() for session in in_memory}
        found = sorted(views.items())
        shown = tuple(view for _, view in found[:limit])
        return SessionPage(
            shown, tuple(_cursor_of(order) for order, _ in found[:limit]), len(found) > limit
        )

    def close_on_disk(self, owner: Owner, session_id: str) -> SessionView | None:
        """Delete a session that is on disk alone, unread; return None if there is none."""
        if self.on_disk is None or self.find(owner, session_id) is not None:
            return None
        return self.on_disk.close(owner, session_id)

    def spare_on_disk(self, owner: Owner, session_id: str) -> None:
        """Delete a session that is on disk alone, unread, if only the surface that opened it has
        used it."""
        if self.on_disk is not None and self.find(owner, session_id) is None:
            self.on_disk.spare(owner, session_id)

    def expire_on_disk(self, now_s: float) -> bool:
        """Delete some sessions that are on disk alone and whose time is over; return whether there
        may be more to do before the next tick."""
        return self.on_disk is not None and self.on_disk.expire(now_s)

    def _order_of(self, owner: Owner, after: str | None) -> int:
        """Return the place in the order that a cursor means, or the id of an open session; None:
        before all. Raises InvalidRequest if it is neither."""
        if after is None:
            return 0
        cursor = _CURSOR.fullmatch(after)
        if cursor is not None:
            return min(int(cursor[1]), _LAST_ORDER)
        order = self.order_of(owner, after)
        if order is None:
            raise InvalidRequest("neither a cursor nor the id of an open session", param="after")
        return order


def _cursor_of(order: int) -> str:
    """Return the cursor of the sessions behind a place in the order. It stays valid when the
    session there closes."""
    return f"~{order}"
