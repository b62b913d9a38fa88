"""`SessionManager`: every session of the server, its turns in order, one truth of its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

from session_server.core.engine_client import EngineClient
from session_server.core.events import EngineEvent, EngineReady, MemoryReported
from session_server.core.session_events import TurnRequest
from session_server.sessions.journal import Journal
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.views import (
    ManagerStats,
    OpenRequest,
    SessionSnapshot,
    SessionView,
    TurnView,
)
from session_server.text.model_text import ModelText

CancelReason = Literal["client_cancelled", "disconnected", "session_closed", "draining"]
CloseReason = Literal["client", "expired", "draining"]


class SessionManager:
    """All verbs belong to the event loop's thread and raise `core.errors` when they refuse."""

    def __init__(
        self,
        engine: EngineClient,
        text: ModelText,
        *,
        secret: bytes,
        limits: SessionLimits | None = None,
        quotas: QuotaLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None: ...

    async def start(self) -> EngineReady:
        """Bring the engine up. Raises EngineUnavailable."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop the engine and the tokenising threads; after `drain`."""

    def open(self, owner: str, request: OpenRequest) -> SessionView:
        """Raises InvalidRequest, SessionExists, QuotaExceeded, ServerBusy, ServerDraining."""
        raise NotImplementedError

    def get(self, owner: str, session_id: str) -> SessionView:
        """Raises SessionNotFound."""
        raise NotImplementedError

    def list(
        self, owner: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[SessionView, ...]:
        """Oldest first, those after session `after`."""
        raise NotImplementedError

    def update(
        self,
        owner: str,
        session_id: str,
        *,
        ttl_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SessionView:
        """None leaves a setting as it is. Journals `SessionUpdated`."""
        raise NotImplementedError

    def close(self, owner: str, session_id: str, *, reason: CloseReason = "client") -> SessionView:
        """Begin to close; `SessionClosed` ends the journal, at once when no turn runs."""
        raise NotImplementedError

    async def submit(self, owner: str, session_id: str, request: TurnRequest) -> TurnView:
        """Accept a turn, or refuse it by raising with nothing changed.

        Returns as soon as the turn is queued or sent to the engine; a turn id seen before gives
        the same turn again. Raises SessionNotFound, SessionClosing, SessionBusy, TurnConflict,
        InvalidRequest, ContextTooLong, TokenizeFailed, QuotaExceeded, ServerBusy, ServerDraining,
        EngineUnavailable.
        """
        raise NotImplementedError

    def cancel(
        self,
        owner: str,
        session_id: str,
        turn_id: str | None = None,
        *,
        keep_partial: bool = True,
        reason: CancelReason = "client_cancelled",
    ) -> TurnView:
        """End a turn early (None: the running one, else the first queued).

        Raises TurnNotFound, TurnNotActive.
        """
        raise NotImplementedError

    def turn(self, owner: str, session_id: str, turn_id: str) -> TurnView:
        """A turn that waits, runs, or ended recently. Raises TurnNotFound."""
        raise NotImplementedError

    def journal(self, owner: str, session_id: str) -> Journal:
        """The session's log. It stays readable by whoever holds it after the session is gone."""
        raise NotImplementedError

    def snapshot(self, owner: str, session_id: str) -> SessionSnapshot:
        """The state a reader continues from who lost the journal."""
        raise NotImplementedError

    def history(self, owner: str, session_id: str) -> tuple[int, ...]:
        """Token ids of the session as of the last turn that ended."""
        raise NotImplementedError

    async def memory(self, *, full: bool = False) -> MemoryReported:
        """The engine's accounts; `full` runs the level-2 audit. Raises EngineUnavailable."""
        raise NotImplementedError

    async def flush(self) -> bool:
        """Cool every session and empty the tree; False when turns are live."""
        raise NotImplementedError

    def stats(self) -> ManagerStats:
        """For metrics."""
        raise NotImplementedError

    def on_event(self, event: EngineEvent) -> None:
        """Listener of the engine; called on the event loop's thread, in order."""

    def tick(self, now_s: float | None = None) -> None:
        """About once a second: close sessions idle beyond their TTL, drop old journal entries."""

    async def drain(self, deadline_s: float) -> None:
        """Refuse new work, give running turns `deadline_s`, cancel the rest, close everything."""
