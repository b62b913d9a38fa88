"""Close what tenants leave behind whose last key was taken back: sessions, responses,
conversations."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Final

from session_server.core.errors import SessionNotFound
from session_server.core.owner import Owner
from session_server.sessions.conversations import UnnamedConversations
from session_server.sessions.manager import SessionManager
from session_server.sessions.response_turns import ResponseTurns
from session_server.web.authenticator import Authenticator

CLOSED_AT_ONCE: Final = 32
"""Sessions closed before others are served."""


class RevokedOwners:
    """Hold the tenants that have no key and may still hold something."""

    def __init__(
        self,
        sessions: SessionManager,
        unnamed: UnnamedConversations,
        responses: ResponseTurns,
        authenticator: Authenticator,
    ) -> None:
        self._sessions = sessions
        self._unnamed = unnamed
        self._responses = responses
        self._has_key = authenticator.has_key
        self._quotas = sessions.edits.parts.quotas
        self._owners: dict[str, Owner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, owners: Iterable[Owner]) -> None:
        """Begin to close what these hold."""
        self._owners.update((owner.owner_id, owner) for owner in owners)

    async def close_all(self) -> None:
        """Close what they hold, in slices. Call it until nobody is left: requests that ran when
        their key went may open something behind this."""
        for owner_id, owner in list(self._owners.items()):
            if not self._has_key(owner):
                await self._close(owner)
            if self._has_key(owner) or not self._quotas.holds(owner):
                del self._owners[owner_id]
            await asyncio.sleep(0)  # many may go at once

    async def _close(self, owner: Owner) -> None:
        self._unnamed.resting.close_all(owner)
        while not self._has_key(owner) and self._responses.forget_some(owner, CLOSED_AT_ONCE):
            await self._sessions.stored()  # whoever waits for the disk waits for no more
        after: str | None = None
        while not self._has_key(owner):
            page = await self._sessions.list(owner, limit=CLOSED_AT_ONCE, after=after)
            for view in page.sessions:
                with contextlib.suppress(SessionNotFound):
                    await self._sessions.exits.prepare_close(owner, view.session_id)
                    self._sessions.close(owner, view.session_id, reason="revoked")
            await self._sessions.stored()
            if not page.has_more:
                return
            after = page.next_after
