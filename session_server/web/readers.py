"""Count connections, and the readers of each session, so that a turn can end when its last reader
leaves.

A connection is what a client has opened, whatever runs in it. A turn does not end with its socket.
A turn with `on_disconnect: cancel` is canceled when no reader of its session is left; every other
turn runs on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from session_server.core.errors import ServerBusy, SessionServerError
from session_server.core.owner import Owner
from session_server.metrics.prometheus import ReaderKind
from session_server.sessions.budget import OwnerBudget
from session_server.web.services import AppServices

MAX_BOUND_TURNS: Final = 64
"""Maximum turns of one session bound to its readers; the session's queue bounds the live ones."""

MAX_SESSION_READERS: Final = 16
"""Readers of one session over HTTP, beside one for each of its turns that may wait or run. Each of
them encodes every entry itself."""


@dataclass(slots=True)
class SessionReaders:
    """Count the readers of one session, and hold the turns that are canceled when the last goes.

    `bound_turns`: ids of live turns -> whether the cancel keeps the partial answer.
    """

    num_readers: int = 0
    bound_turns: dict[str, bool] = field(default_factory=dict)

    def bind_turn(self, turn_id: str, *, keep_partial: bool) -> None:
        """Cancel this turn when the last reader disconnects."""
        self.bound_turns[turn_id] = keep_partial
        while len(self.bound_turns) > MAX_BOUND_TURNS:
            del self.bound_turns[next(iter(self.bound_turns))]

    def unbind_turn(self, turn_id: str) -> None:
        """Forget a turn that has ended."""
        self.bound_turns.pop(turn_id, None)


class Readers:
    """Track all readers of the server."""

    def __init__(self, services: AppServices) -> None:
        self._sessions = services.sessions
        self._metrics = services.metrics
        num_turns = 1 + services.settings.max_queued_turns
        self._max_session_readers = MAX_SESSION_READERS + num_turns
        self._budget = OwnerBudget(
            "connections",
            services.settings.max_connections,
            limit_of=lambda owner: owner.limits.max_connections,
        )
        self._by_session: dict[tuple[Owner, str], SessionReaders] = {}

    @property
    def num_connections(self) -> int:
        """Return how many connections there are."""
        return self._budget.total

    def num_of(self, owner: Owner) -> int:
        """Return how many connections an owner has."""
        return self._budget.held_by(owner)

    @contextlib.contextmanager
    def connected(self, owner: Owner, kind: ReaderKind) -> Iterator[None]:
        """Count a connection of an owner inside the block. Enter it before anything is done for it.

        Raises:
            ServerBusy: the maximum number of connections of the server is open.
            QuotaExceeded: that of the owner, or its share of the server's.
        """
        with self._budget.held(owner, 1):
            self._metrics.connection_opened(kind)
            try:
                yield
            finally:
                self._metrics.connection_closed(kind)

    def num_readers(self, owner: Owner, session_id: str) -> int:
        """Return how many readers a session has."""
        found = self._by_session.get((owner, session_id))
        return 0 if found is None else found.num_readers

    @contextlib.contextmanager
    def reading(
        self, owner: Owner, session_id: str, *, is_bounded: bool = True
    ) -> Iterator[SessionReaders]:
        """Count one reader of a session inside the block. Enter it before the turn to read is
        submitted.

        `is_bounded` False: of such there are few, for example one WebSocket. Raises ServerBusy: the
        maximum number of readers of the session is there.
        """
        # Two owners may choose the same session id.
        key = (owner, session_id)
        session_readers = self._by_session.get(key, SessionReaders())
        if is_bounded and session_readers.num_readers >= self._max_session_readers:
            raise ServerBusy(f"{session_readers.num_readers} readers of this session, the maximum.")
        self._by_session[key] = session_readers
        session_readers.num_readers += 1
        try:
            yield session_readers
        finally:
            session_readers.num_readers -= 1
            if session_readers.num_readers == 0:
                del self._by_session[key]
                self._cancel_bound(owner, session_id, session_readers)

    def _cancel_bound(self, owner: Owner, session_id: str, session_readers: SessionReaders) -> None:
        for turn_id, keep_partial in session_readers.bound_turns.items():
            # The turn or its session may have ended in the meantime.
            with contextlib.suppress(SessionServerError):
                self._sessions.cancel(
                    owner, session_id, turn_id, keep_partial=keep_partial, reason="disconnected"
                )
