"""`Lookout`: see when sessions are free that other replicas hold, for all who wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from session_server.core.errors import ServerDraining
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.store.backend import SharedDatabase
from session_server.sessions.store.lease import ReplicaLease
from session_server.sessions.store.ownership import HeldBy

ASK_AGAIN_S: Final = 1.0
"""How often a session is asked for: a replica that has lost its connection to the database has not
heard it."""

_FIRST_LOOK_S: Final = 0.01
_LAST_LOOK_S: Final = 0.25


@dataclass(slots=True, eq=False)
class _Waiting:
    """Hold who waits for a session until a time of the loop, and when that is looked at and asked
    for next. `told`: who holds it in the end; None if nobody does."""

    held: HeldBy
    until_s: float
    told: asyncio.Future[HeldBy | None]
    look_s: float = 0.0
    delay_s: float = _FIRST_LOOK_S
    ask_s: float = 0.0

    def note(self, held: HeldBy | None, now_s: float) -> None:
        """Note who holds the session, as somebody has seen who began to look at a time."""
        if self.told.done():
            return
        if held is None or now_s >= self.until_s:
            self.told.set_result(held)
            return
        self.held = held
        self.look_s, self.delay_s = now_s + self.delay_s, min(2 * self.delay_s, _LAST_LOOK_S)
        if self.ask_s <= now_s:
            self.ask_s = now_s + ASK_AGAIN_S


class Lookout:
    """Ask for sessions and look at them, with one read of the database at a time, however many
    wait."""

    def __init__(self, lease: ReplicaLease, sessions: SessionRegistry) -> None:
        self._lease, self._sessions = lease, sessions
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def until_free(self, held: HeldBy, until_s: float) -> HeldBy | None:
        """Wait until no other replica holds a session, or a time of the loop; return who does then.

        Raises ServerDraining, SessionMoved and what a read raises.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(held, until_s, loop.create_future())
        self._waiting.append(waiting)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._look_out(), name="lookout")
        return await waiting.told

    async def _look_out(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            now_s = loop.time()
            due = [each for each in self._waiting if each.look_s <= now_s]
            try:
                holders = await self._look(due, now_s) if due else {}
            except Exception as error:  # noqa: BLE001 - it belongs to those who wait
                for each in due:
                    if not each.told.done():
                        each.told.set_exception(error)
            else:
                for each in due:
                    each.note(holders.get(each.held.number), now_s)
            self._waiting = [each for each in self._waiting if not each.told.done()]
            await asyncio.sleep(_FIRST_LOOK_S)

    async def _look(self, due: Sequence[_Waiting], now_s: float) -> dict[int, HeldBy]:
        """Ask for sessions whose time has come, and return which of all others hold."""
        if self._sessions.is_ending:
            raise ServerDraining("the server is shutting down")
        self._lease.check()
        asked = [each.held for each in due if each.ask_s <= now_s]
        numbers = [each.held.number for each in due]
        found = await self._lease.read(partial(_ask, self._lease.database, asked, numbers))
        return {each.number: each for each in found}


def _ask(database: SharedDatabase, asked: Sequence[HeldBy], numbers: Sequence[int]) -> list[HeldBy]:
    if asked:
        database.ask_for(asked)
    return database.holders_of(numbers)
