"""Count the readers of each session, so that a turn can end when its last reader leaves.

A turn does not end with its socket. A turn with `on_disconnect: cancel` is canceled when no reader
of its session is left; every other turn runs on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from session_server.core.errors import ServerBusy, SessionServerError
from session_server.core.owner import Owner
from session_server.metrics.prometheus import ReaderKind
from session_server.web.services import AppServices

MAX_BOUND_TURNS: Final = 64
"""Maximum turns of one session bound to its readers; the session's queue bounds the live ones."""


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
        self._max_readers = services.settings.max_connections
        self._num_readers = 0
        self._by_session: dict[tuple[Owner, str], SessionReaders] = {}

    def check_capacity(self) -> None:
        """Refuse a reader too many, before a turn is submitted for it.

        Raises:
            ServerBusy: the maximum number of readers is connected.
        """
        if self._num_readers >= self._max_readers:
            raise ServerBusy(f"{self._num_readers} readers are connected, the maximum.")

    @contextlib.contextmanager
    def register(
        self, *, owner: Owner, session_id: str, kind: ReaderKind
    ) -> Iterator[SessionReaders]:
        """Count one reader of a session inside the block."""
        # Two owners may choose the same session id.
        session_readers = self._by_session.setdefault((owner, session_id), SessionReaders())
        session_readers.num_readers += 1
        self._num_readers += 1
        self._metrics.connection_opened(kind)
        try:
            yield session_readers
        finally:
            self._metrics.connection_closed(kind)
            session_readers.num_readers -= 1
            self._num_readers -= 1
            if session_readers.num_readers == 0:
                del self._by_session[owner, session_id]
                self._cancel_bound(owner, session_id, session_readers)

    def _cancel_bound(self, owner: Owner, session_id: str, session_readers: SessionReaders) -> None:
        for turn_id, keep_partial in session_readers.bound_turns.items():
            # The turn or its session may have ended in the meantime.
            with contextlib.suppress(SessionServerError):
                self._sessions.cancel(
                    owner, session_id, turn_id, keep_partial=keep_partial, reason="disconnected"
                )
