"""`ReplicaLease`: know for how long this replica may answer for the sessions of a shared store.

A replica has one lease for all that it holds, so that to renew it costs the same however many those
are. The database decides: what a replica writes whose lease is over is refused there, also by one
that was stopped and knows nothing of it. By its own clock it stops answering before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from session_server.core.errors import SessionMoved
from session_server.sessions.bugs import contained, log_bug
from session_server.sessions.daemon_threads import DaemonThreads
from session_server.sessions.store.backend import SharedDatabase
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.ownership import Joined, LeaseLost

_logger: Final = logging.getLogger("session_server.store")

LEASE_S: Final = 6.0
"""How long others wait for a replica that says nothing, before they take its sessions."""

RENEWALS: Final = 4
"""Renewals within one lease."""

MARGIN_S: Final = 1.0
"""How long before the end of its lease a replica stops answering: its clock may run slower."""

READS_AT_ONCE: Final = 16
"""Reads of the database that are under way, also those that nobody waits for any more; others
wait."""

READ_WAIT_S: Final = 10.0
"""How long one may wait and take."""

RETRY_S: Final = 0.5
"""How long a replica that could not renew or listen waits before it tries again."""

_LISTEN_S: Final = 5.0
"""How long one look takes for what others ask; another one follows."""

_T = TypeVar("_T")


@dataclass(slots=True)
class LeaseListeners:
    """Hold whom a lease tells: that it is over (a new one begins once `is_losing` says that nothing
    is left of what this replica held), and which session another replica asks for, by number."""

    on_lost: Callable[[], None] = lambda: None
    is_losing: Callable[[], bool] = lambda: False
    on_asked: Callable[[int], None] = lambda _number: None


class ReplicaLease:
    """Keep the lease of this replica. Call every method on the event loop's thread, once it runs.

    `told`: who is told of what becomes of it. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        database: SharedDatabase,
        *,
        address: str = "",
        role: str = "both",
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.database = database
        self._named, self._lease_s, self._clock = (address, role), lease_s, clock
        self._until_s = self._offset_s = -math.inf
        self._joined = Joined(0, 0, 0.0)
        self.failure: str | None = None
        """Why the lease was not renewed, or no other one begun; None if it was."""

        self.told = LeaseListeners()
        self._tasks: list[asyncio.Task[None]] = []
        self._threads = DaemonThreads("store-reader")
        self._at_once = asyncio.Semaphore(READS_AT_ONCE)

    def slot_now(self) -> int:
        """Return the slot that no other replica has."""
        return self._joined.slot

    @property
    def replica_id(self) -> int:
        """Return the id of this replica while its lease goes on: no other one ever has it."""
        return self._joined.replica_id

    def wall_s(self) -> float:
        """Return the database's clock, in seconds since 1970, as of the last renewal."""
        return self._clock() + self._offset_s

    @property
    def is_held(self) -> bool:
        """Return whether this replica may answer for what it holds."""
        return self._clock() < self._until_s

    def check(self) -> None:
        """Raise SessionMoved if this replica may not answer for what it has in memory."""
        if not self.is_held:
            raise SessionMoved("this replica has lost its lease: ask again")

    def join(self) -> None:
        """Begin a lease; waits for the database. Raises what that raises."""
        self._begin(*self._ask_to_join())

    def _ask_to_join(self) -> tuple[float, Joined]:
        asked_s = self._clock()
        address, role = self._named
        return asked_s, self.database.join(address, self._lease_s, role=role)

    def _begin(self, asked_s: float, joined: Joined) -> None:
        self._joined = joined
        self._note(asked_s, joined.now_s)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep the lease from now on, and listen to what others ask for."""
        self._tasks = [
            loop.create_task(self._keep(), name="keep lease"),
            loop.create_task(self._watch(), name="watch lease"),
            loop.create_task(self._listen(), name="listen to replicas"),
        ]

    async def stop(self, *, leaves: bool = True) -> None:
        """Keep the lease no longer. Once all is written it `leaves`: it gives up all sessions at
        once, and else when the lease has run out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._until_s = -math.inf
        if not leaves:
            return
        try:
            async with asyncio.timeout(READ_WAIT_S):
                await self._ask(self.database.leave)
        except LeaseLost:
            return
        except self.database.read_errors as error:
            _logger.warning("the lease runs out by itself: %s", self.database.explain(error))

    async def read(
        self, call: Callable[[], _T], *, on_over: Callable[[], object] = lambda: None
    ) -> _T:
        """Ask the database on a thread. `on_over` is called once the database is asked no more,
        which may be after this has given up. Raises what the call raises, TimeoutError."""
        loop = asyncio.get_running_loop()

        def give_back() -> None:
            self._at_once.release()
            on_over()

        def answered(_answer: Future[_T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is over, and nobody waits
                loop.call_soon_threadsafe(give_back)

        async with asyncio.timeout(READ_WAIT_S):
            try:
                await self._at_once.acquire()
            except BaseException:
                on_over()
                raise
            try:
                answer = self._threads.submit(call)
            except BaseException:
                give_back()
                raise
            # A database that hangs has the threads of those that have given up, and no others.
            answer.add_done_callback(answered)
            return await asyncio.wrap_future(answer)

    async def _ask(self, call: Callable[[], _T]) -> _T:
        """As `read`, beside all reads: what keeps the lease waits for none of them, and the
        database bounds how long it takes."""
        return await asyncio.wrap_future(self._threads.submit(call))

    async def _keep(self) -> None:
        wait_s = self._lease_s / RENEWALS
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._lease_s / RENEWALS
            try:
                await self._renew()
            except Exception as error:  # noqa: BLE001 - without a lease nothing is served
                self._note_failure(error)
                wait_s = RETRY_S

    async def _watch(self) -> None:
        """Have the lease be over when its time is, whatever is being waited for."""
        while True:
            if not self.is_held:
                with contained("a lost lease was not told of"):
                    self._lose()
            left_s = max(self._until_s - self._clock(), 0.0)
            await asyncio.sleep(min(left_s, self._lease_s) or self._lease_s / RENEWALS)

    def _note_failure(self, error: Exception) -> None:
        if not isinstance(error, (StoreUnusable, *self.database.read_errors)):
            log_bug("the lease was not renewed", error)
        why = self.database.explain(error)
        if why != self.failure:
            _logger.warning("the lease was not renewed: %s", why)
        self.failure = why

    async def _renew(self) -> None:
        """Renew the lease, or begin another one where it is over."""
        asked_s = self._clock()
        try:
            if not self.is_held:
                raise LeaseLost
            now_s = await self._ask(partial(self.database.renew, self._lease_s))
            if not self.is_held:  # the answer came too late: what was held is given up
                raise LeaseLost
            self._note(asked_s, now_s)
        except LeaseLost:
            self._lose()
            while self.told.is_losing():
                await asyncio.sleep(0)
            self._begin(*await self._ask(self._ask_to_join))

    def _lose(self) -> None:
        if self._until_s > -math.inf:
            self._until_s = min(self._until_s, self._clock())
            _logger.error("the lease of this replica is over: its sessions go on in others")
            self.told.on_lost()
            self._until_s = -math.inf  # it is known, and another one may begin

    def _note(self, asked_s: float, now_s: float) -> None:
        # Of the time between the question and the answer the database may have used all or none.
        self.failure = None
        self._until_s = asked_s + self._lease_s - min(MARGIN_S, self._lease_s / RENEWALS)
        self._offset_s = now_s - self._clock()

    async def _listen(self) -> None:
        while True:
            try:
                numbers = await self._ask(partial(self.database.asked, _LISTEN_S))
            except Exception as error:  # noqa: BLE001 - who does not listen keeps what others need
                if not isinstance(error, (LeaseLost, *self.database.read_errors)):
                    log_bug("nothing was heard of other replicas", error)
                numbers = []
                await asyncio.sleep(RETRY_S)
            for number in numbers:
                with contained("a session that was asked for was not given up"):
                    self.told.on_asked(number)
