"""Who reads which session, so that a turn can end when its last reader goes.

A turn's life is its journal's, not its socket's. A turn that asked for `on_disconnect: cancel` is
cancelled when nobody reads its session any more; every other turn runs on.
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
"""Turns of one session bound to its readers; live ones are bounded by the session's queue."""


@dataclass(slots=True)
class Watch:
    """The readers of one session. `bound`: live turn ids -> whether a cancel keeps the partial."""

    readers: int = 0
    bound: dict[str, bool] = field(default_factory=dict)

    def bind(self, turn_id: str, *, keep_partial: bool) -> None:
        """Cancel this turn when the last reader goes."""
        self.bound[turn_id] = keep_partial
        while len(self.bound) > MAX_BOUND_TURNS:
            del self.bound[next(iter(self.bound))]

    def release(self, turn_id: str) -> None:
        """The turn has ended."""
        self.bound.pop(turn_id, None)


class Readers:
    """All readers of the server."""

    def __init__(self, services: AppServices) -> None:
        self._sessions = services.sessions
        self._metrics = services.metrics
        self._max_readers = services.settings.max_connections
        self._num_readers = 0
        self._watches: dict[tuple[Owner, str], Watch] = {}

    def check_room(self) -> None:
        """Refuse a reader too many; asked before a turn is submitted for it.

        Raises:
            ServerBusy: as many as allowed are reading.
        """
        if self._num_readers >= self._max_readers:
            raise ServerBusy(f"{self._num_readers} readers are connected, the maximum.")

    @contextlib.contextmanager
    def reading(self, *, owner: Owner, session_id: str, kind: ReaderKind) -> Iterator[Watch]:
        """Count one reader of a session inside the block."""
        # Owners may choose equal ids.
        watch = self._watches.setdefault((owner, session_id), Watch())
        watch.readers += 1
        self._num_readers += 1
        self._metrics.connection_opened(kind)
        try:
            yield watch
        finally:
            self._metrics.connection_closed(kind)
            watch.readers -= 1
            self._num_readers -= 1
            if watch.readers == 0:
                del self._watches[owner, session_id]
                self._cancel_bound(owner, session_id, watch)

    def _cancel_bound(self, owner: Owner, session_id: str, watch: Watch) -> None:
        for turn_id, keep_partial in watch.bound.items():
            # The turn or its session may have ended meanwhile, which is what was wanted.
            with contextlib.suppress(SessionServerError):
                self._sessions.cancel(
                    owner, session_id, turn_id, keep_partial=keep_partial, reason="disconnected"
                )
