"""`SessionOverview`: the sessions of all owners, for operators."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Literal

from session_server.core.errors import InvalidRequest, SessionNotFound
from session_server.core.events import MemoryReported
from session_server.core.ids import SessionId, TurnId
from session_server.core.owner import Owner
from session_server.sessions.parts import SessionParts
from session_server.sessions.session import Session
from session_server.sessions.store.survey import SurveyQuestion
from session_server.sessions.turn_names import TurnName, TurnNames
from session_server.sessions.views import SessionView, StoredSummary

SortKey = Literal["opened", "active", "tokens", "turns", "cached", "ttft"]

MEASURED_TURNS: Final = 16
"""Last turns of a session from which its hit rate and times to first token are measured."""

_CURSOR: Final = re.compile(r"(-?[0-9]{1,16}(?:\.[0-9]{1,17})?(?:e-[0-9]{1,3})?)~([0-9]{1,20})")
"""What a session is sorted by, and its order."""

_STORED_ID: Final = re.compile(r"d_([0-9]{1,18})")

_Place = tuple[float, int]


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """Describe a session to operators.

    `id`: the engine's, which no two owners share; of one on disk alone `d_` and its number.
    `idle_s`: since its last turn
    ended or it was opened, 0 while one runs. `input_tokens` and `cached_tokens`: of the last
    `MEASURED_TURNS` turns; `ttft_ms`: their times to the first token, ascending.
    """

    id: SessionId
    owner: Owner
    view: SessionView
    idle_s: float
    input_tokens: int
    cached_tokens: int
    ttft_ms: tuple[float, ...]

    @property
    def owner_digest(self) -> str:
        """Return what operators see of the owner."""
        return digest_of_owner(self.owner)


@dataclass(frozen=True, slots=True)
class SummaryPage:
    """Hold a page of sessions of `num_matching` in all. `next_after`: the cursor of the next page,
    None on the last one."""

    summaries: tuple[SessionSummary, ...]
    num_matching: int
    next_after: str | None


class SessionOverview:
    """Show the sessions of every owner. Walks of all sessions are made in slices, one at a time."""

    def __init__(
        self,
        parts: SessionParts,
        names: TurnNames,
        clock: Callable[[], float],
        owner_of: Callable[[str], Owner] = Owner,
    ) -> None:
        """Show the sessions that `parts` have. `owner_of` returns the owner of an id."""
        self._sessions, self._link = parts.sessions, parts.link
        self._names = names
        self._clock = clock
        self._owner_of = owner_of
        self._walk = asyncio.Lock()

    async def show(self, session_id: str) -> SessionSummary:
        """Return one session, which is not read for that. Raises SessionNotFound, ServerBusy."""
        session = self._sessions.find_by_engine_id(SessionId(session_id))
        if session is not None:
            return self._summary(session)
        stored = _STORED_ID.fullmatch(session_id)
        on_disk = self._sessions.on_disk
        found = None
        if stored is not None and on_disk is not None:
            found = await on_disk.numbered(int(stored[1]))
        if found is None:
            raise SessionNotFound("No such session: closed or expired, or never opened.")
        owner = self._owner_of(found.owner_id)
        session = self._sessions.find(owner, found.view.session_id)
        return self._unread(found) if session is None else self._summary(session)

    def show_of(self, owner: Owner, session_id: str) -> SessionSummary:
        """Return an owner's session. Raises SessionNotFound."""
        return self._summary(self._sessions.get(owner, session_id))

    async def page(
        self, *, sort: SortKey, limit: int, after: str | None, matching: str = ""
    ) -> SummaryPage:
        """Return the first sessions behind a cursor: the newest by activity, the largest by what
        can be counted, the oldest by opening.

        `matching`: what an id, the owner's digest or the state must contain. A session whose place
        changes meanwhile may be on two pages or none. Raises InvalidRequest.
        """
        start = None if after is None else _place_of(after)
        async with self._walk:
            places: list[tuple[_Place, Session]] = []
            num_matching, loaded = 0, set[int]()
            async for session in self._sessions.in_slices():
                if session.life.log is not None:
                    loaded.add(session.life.order)
                if matching and not _matches(session, matching):
                    continue
                num_matching += 1
                place = self._place(session, sort)
                if start is None or place > start:
                    _keep_first(places, place, session, limit + 1)
            asked = SurveyQuestion(sort, start, limit + 1, matching, _digest_of, frozenset(loaded))
            unread, num_unread = await self._survey(asked)
        first = [
            ((-value, -order), self._summary(session))
            for (value, order), session in places
            if not session.journal.is_closed
        ]
        page = sorted([*first, *unread], key=itemgetter(0))
        has_more = len(page) > limit
        return SummaryPage(
            tuple(summary for _, summary in page[:limit]),
            num_matching + num_unread,
            _cursor_of(page[limit - 1][0]) if has_more else None,
        )

    async def _survey(
        self, asked: SurveyQuestion
    ) -> tuple[list[tuple[_Place, SessionSummary]], int]:
        """Return sessions on disk alone with their places, and how many match."""
        if self._sessions.on_disk is None:
            return [], 0
        found, num_matching = await self._sessions.on_disk.survey(asked)
        unread = [((each.place, each.number), self._unread(each)) for each in found]
        return unread, num_matching

    async def report(
        self, *, session_ids: Sequence[SessionId] = (), steps_after: int | None = None
    ) -> MemoryReported:
        """Return the accounts with what these sessions hold, and the newest steps. Raises
        EngineUnavailable."""
        return await self._link.memory(session_ids=tuple(session_ids), steps_after=steps_after)

    def turn_name(self, engine_id: TurnId) -> TurnName | None:
        """Return whose turn or draft this is; None for one that ended long ago."""
        return self._names.find(engine_id)

    def _idle_s(self, session: Session) -> float:
        return 0.0 if session.live else max(0.0, self._clock() - session.life.last_active_s)

    def _summary(self, session: Session) -> SessionSummary:
        input_tokens, cached_tokens, ttft_ms = session.ended.measure(MEASURED_TURNS)
        return SessionSummary(
            id=session.copy.session_id,
            owner=session.owner,
            view=session.view(),
            idle_s=self._idle_s(session),
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            ttft_ms=tuple(sorted(ttft_ms)),
        )

    def _unread(self, found: StoredSummary) -> SessionSummary:
        """Return what the disk says of a session without reading it."""
        return SessionSummary(
            id=SessionId(f"d_{found.number}"),
            owner=self._owner_of(found.owner_id),
            view=found.view,
            idle_s=found.idle_s,
            input_tokens=0,
            cached_tokens=0,
            ttft_ms=(),
        )

    def _place(self, session: Session, sort: SortKey) -> _Place:
        """Return where a session stands: the smaller, the earlier."""
        match sort:
            case "opened":
                value = 0.0
            case "active":
                value = -session.life.last_active_s if session.live is None else -1e15
            case "tokens":
                value = -float(len(session.transcript))
            case "turns":
                value = -float(len(session.ended))
            case "cached":
                num_input, num_cached, _ = session.ended.measure(MEASURED_TURNS)
                value = -(num_cached / num_input) if num_input else 1.0
            case "ttft":
                value = -max(session.ended.measure(MEASURED_TURNS)[2], default=-1.0)
        return value, session.life.order


def digest_of_owner(owner: Owner) -> str:
    """Return what operators see of an owner: the same for each of its sessions, and no key."""
    return _digest_of(owner.owner_id)


def _digest_of(owner_id: str) -> str:
    return hashlib.blake2b(owner_id.encode(), digest_size=4).hexdigest()


def percentile(ascending: Sequence[float], share: float) -> float | None:
    """Return the smallest value that this share of them does not exceed; None without values."""
    if not ascending:
        return None
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def _matches(session: Session, text: str) -> bool:
    state = session.copy.state if session.closing is None else "closing"
    ids = session.session_id, session.copy.session_id
    places: Iterable[str] = (*ids, digest_of_owner(session.owner), state)
    return any(text in place for place in places)


def _keep_first(
    heap: list[tuple[_Place, Session]], place: _Place, session: Session, limit: int
) -> None:
    """Keep the first of all places; negated, so that the last of those is on top of the heap. No
    two are equal, so sessions are never compared."""
    entry = (-place[0], -place[1]), session
    if len(heap) < limit:
        heapq.heappush(heap, entry)
    else:
        heapq.heappushpop(heap, entry)


def _cursor_of(place: _Place) -> str:
    return f"{place[0]!r}~{place[1]}"


def _place_of(cursor: str) -> _Place:
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise InvalidRequest("not a cursor of this list", param="after")
    return float(found[1]), int(found[2])
