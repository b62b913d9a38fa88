"""Hold the parts of a manager that know its sessions, for those that change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from session_server.core.errors import SessionBusy
from session_server.core.owner import Owner
from session_server.sessions.backlog import Backlog
from session_server.sessions.engine_link import EngineLink
from session_server.sessions.quotas import Quotas
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.session import Session
from session_server.sessions.session_logs import SessionLogs
from session_server.sessions.tokenizing import PromptBuilder

NOT_ENDED: Final = "a turn of this session has not ended; wait for its end, or cancel it"


@dataclass(frozen=True, slots=True)
class SessionParts:
    """Hold the parts of a manager that know its sessions. `mark_cold` journals that the KV of one
    is gone, at a client's request."""

    sessions: SessionRegistry
    link: EngineLink
    quotas: Quotas
    prompts: PromptBuilder
    mark_cold: Callable[[Session], None]
    logs: SessionLogs
    backlog: Backlog

    def resting(self, owner: Owner, session_id: str) -> Session:
        """Return a session in which no turn runs or waits. Raises SessionNotFound, SessionClosing,
        SessionBusy."""
        session = self.sessions.use(owner, session_id)
        session.check_not_closing()
        if not session.is_idle:
            raise SessionBusy(NOT_ENDED)
        return session
