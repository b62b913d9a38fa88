"""Which sessions there are, found by their owner: another owner's id is simply unknown."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from session_server.core.errors import InvalidRequest, SessionExists, SessionNotFound
from session_server.core.ids import SessionId
from session_server.core.owner import Owner
from session_server.sessions.session import Session

_NOT_FOUND = "No such session: closed, expired, or opened with another key."


class SessionRegistry:
    """Open sessions by (owner, id) and by the id the engine knows."""

    def __init__(self) -> None:
        self._by_owner: dict[Owner, dict[str, Session]] = {}
        self._by_copy: dict[SessionId, Session] = {}

    def __len__(self) -> int:
        return len(self._by_copy)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_copy.values()))

    def add(self, session: Session) -> None:
        """Take in a session whose id `check_free` allowed."""
        self._by_owner.setdefault(session.owner, {})[session.session_id] = session
        self._by_copy[session.copy.session_id] = session

    def remove(self, session: Session) -> None:
        """Forget a session; its id is free again."""
        owned = self._by_owner[session.owner]
        del owned[session.session_id]
        if not owned:
            del self._by_owner[session.owner]
        del self._by_copy[session.copy.session_id]

    def check_free(self, owner: Owner, session_id: str) -> None:
        """Raise SessionExists when the owner has an open session of this id."""
        if session_id in self._by_owner.get(owner, {}):
            raise SessionExists("the session id is in use", param="id")

    def get(self, owner: Owner, session_id: str) -> Session:
        """Raise SessionNotFound for an unknown id and for another owner's alike."""
        session = self._by_owner.get(owner, {}).get(session_id)
        if session is None:
            raise SessionNotFound(_NOT_FOUND)
        return session

    def of_copy(self, session_id: SessionId) -> Session | None:
        """The session the engine knows by this id."""
        return self._by_copy.get(session_id)

    def page(self, owner: Owner, *, limit: int, after: str | None) -> list[Session]:
        """Up to `limit` sessions of an owner, oldest first, behind session `after`."""
        owned = self._by_owner.get(owner, {})
        sessions = iter(owned.values())
        if after is not None:
            if after not in owned:
                raise InvalidRequest("no such session to list after", param="after")
            for session in sessions:
                if session.session_id == after:
                    break
        return list(itertools.islice(sessions, limit))
