"""`Process`: one life of a replica, from its start to its end or its crash."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, Literal

from session_server.core.owner import Owner
from session_server.sessions.manager import SessionManager
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.salts import TenantSalts
from session_server.sessions.session import Session
from session_server.sessions.shared_sessions import SharedSessions
from session_server.sessions.store.disk_health import DiskHealth
from session_server.sessions.store.lease import ReplicaLease
from session_server.sessions.store.session_store import SessionStore
from tests.sessions.paper_engine import PaperEngine
from tests.sessions.world import letters, model_text
from tests.sim.draws import Draws
from tests.sim_replicas.database import SimDatabase
from tests.sim_replicas.judge import Broken
from tests.sim_replicas.link import Link, Waiting
from tests.sim_replicas.schedule import Schedule
from tests.sim_replicas.server import DatabaseServer
from tests.sim_replicas.threads import ReplicaLoop, SimCommits, SimThreads

OWNER: Final = Owner("name:owner")
_TICK_S: Final = 1.0
_EPSILON_S: Final = 1e-6
"""A timer is looked at so much behind its time: clocks are converted into each other."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The monotonic clock of a replica: `rate` of its seconds are one of the world's."""

    rate: float
    begun_s: float

    def local_s(self, world_s: float) -> float:
        """Return what it shows."""
        return 100.0 + (world_s - self.begun_s) * self.rate

    def world_s(self, local_s: float) -> float:
        """Return when it shows that."""
        return self.begun_s + (local_s - 100.0) / self.rate


@dataclass(slots=True)
class Migration:
    """Hold how far a replica has moved to another host. `unwritten`: the sessions that it had not
    written when it froze; None before."""

    unwritten: frozenset[str] | None = None


@dataclass(slots=True)
class Site:
    """What all processes have around them. `step_s`: of each engine."""

    schedule: Schedule
    server: DatabaseServer
    waiting: Waiting
    draws: Draws
    quotas: QuotaLimits
    step_s: float


@lru_cache(maxsize=1)
def _vocabulary() -> tuple[tuple[int, ...], tuple[int, ...], int]:
    text = model_text()
    return letters(text), tuple(sorted(text.eos_token_ids)), len(text.tokenizer.vocabulary)


def _paper_engine() -> PaperEngine:
    alphabet, ends, size = _vocabulary()

    def next_token(context: list[int]) -> int:
        draw = len(context) * 31 + context[-1] * 7
        return ends[0] if draw % 29 == 0 else alphabet[draw % len(alphabet)]

    return PaperEngine(vocab_size=size, eos_ids=ends, max_turn_len=4096, next_token=next_token)


class _SimStore(SessionStore):
    """A store whose writer is a task."""

    def write_over(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        """Write over a link, and start."""
        assert isinstance(self._database, SimDatabase)
        commits = SimCommits(self._database, self._deliver, link)
        self._commits = commits
        self.start(loop)
        commits.start_in(loop)


class Process:
    """A manager with an engine on paper, on an event loop of its own that keeps its own time."""

    def __init__(self, site: Site, name: str, clock: Clock, wall_s: Callable[[], float]) -> None:
        self.site, self.name, self.clock = site, name, clock
        self.state: Literal["up", "paused", "dead"] = "up"
        self.loop = ReplicaLoop(wall_s)
        self.loop.advance(clock.local_s(site.schedule.now_s))
        self.link = Link(site.waiting, site.schedule, site.draws, self.deliver)
        self.engine = _paper_engine()
        self.migration: Migration | None = None
        self._wake_s = math.inf
        self._is_engine_due = False
        self.lease = self._join()
        self.manager = self._manager()
        self.loop.create_task(self.manager.start())
        self.loop.create_task(self._tick())
        self.run()

    def _join(self) -> ReplicaLease:
        self.loop.threads = threads = SimThreads(self.link, self.loop.time)
        database = SimDatabase(self.site.server, threads.ask)
        lease = ReplicaLease(database, address=self.name, clock=threads.clock)
        lease._threads = threads  # type: ignore[assignment]  # run as those do
        lease.join()
        return lease

    def _manager(self) -> SessionManager:
        store = _SimStore(
            self.lease.database,
            model=b"tokenizer",
            wall=self.lease.wall_s,
            clock=self.loop.time,
            lease=self.lease,
        )
        store.health = DiskHealth(store.place, self.lease.database.explain, self.loop.time)
        manager = SessionManager(
            self.engine,
            model_text(),
            salts=TenantSalts(b"0123456789abcdef", share_prefixes=True),
            quotas=self.site.quotas,
            clock=self.loop.time,
        )
        manager.store_in(store)
        self._count_moves(manager)
        store.write_over(self.link, self.loop)
        return manager

    def _count_moves(self, manager: SessionManager) -> None:
        """Count what happens to sessions here, for the coverage."""
        reached, lease, exits = self.site.server.reached, self.lease, manager.exits
        shared, logs = manager._sessions.on_disk, exits.parts.logs
        assert isinstance(shared, SharedSessions)
        give_up, on_lost, on_moved = shared.give_up, lease.told.on_lost, logs.on_moved
        on_asked = lease.told.on_asked

        def asked(number: int) -> None:
            session = manager._sessions.numbered(number)
            where = "in memory" if session else "being read" if shared._loading else "on disk"
            reached[f"asked for one {where}"] += 1
            on_asked(number)

        def given_up(session: Session) -> None:
            reached["given up with a turn" if session.live else "given up at rest"] += 1
            give_up(session)

        def lost() -> None:
            reached["lease lost"] += 1
            on_lost()

        def moved(session: Session) -> None:
            reached["write refused"] += 1
            reached["write refused under a live lease"] += self.site.server.is_live(self.me)
            on_moved(session)

        lease.told.on_asked, lease.told.on_lost = asked, lost
        shared.give_up, logs.on_moved = given_up, moved

    @property
    def shared(self) -> SharedSessions:
        """Return its sessions of the shared store."""
        shared = self.manager._sessions.on_disk
        assert isinstance(shared, SharedSessions)
        return shared

    @property
    def is_moving(self) -> bool:
        """Return whether a session is on its way here, or from here."""
        return bool(self.shared._loading or self.shared._leaving)

    @property
    def is_right(self) -> bool:
        """Return whether nothing is wrong with it and its way to the database."""
        return self.state == "up" and self.link.is_right and self.lease.is_held

    @property
    def is_used(self) -> bool:
        """Return whether it runs, and has sessions in memory."""
        return self.state == "up" and bool(list(self.manager._sessions))

    @property
    def is_working(self) -> bool:
        """Return whether it runs, and runs turns."""
        return self.state == "up" and any(each.live for each in self.manager._sessions)

    def _find(self, name: str) -> Session | None:
        return self.manager._sessions.find(OWNER, name)

    def is_busy(self, name: str) -> bool:
        """Return whether it runs a turn of a session."""
        session = self._find(name)
        return session is not None and session.live is not None

    def has(self, name: str) -> bool:
        """Return whether it has a session in memory."""
        return self.number_of(name) is not None

    def number_of(self, name: str) -> int | None:
        """Return the number of a session that it has in memory."""
        session = self._find(name)
        return None if session is None else session.life.order

    def not_its_own(self) -> list[str]:
        """Return the names of sessions in memory that the database does not say are its own."""
        held = self.site.server.tables.sessions
        stored = [each for each in self.manager._sessions if each.life.log is not None]
        return [
            each.session_id
            for each in stored
            if (found := held.get(each.life.order)) is None or found.holder != self.me
        ]

    def was_opened_here(self, name: str) -> bool:
        """Return whether it has a session that was never in another replica."""
        session = self._find(name)
        log = None if session is None else session.life.log
        return log is not None and log.hold.epoch == 1

    def unwritten(self) -> list[str]:
        """Return the names of sessions in memory of which the database has not all."""
        logs = ((each.session_id, each.life.log) for each in self.manager._sessions)
        return [name for name, log in logs if log is not None and not log.is_written]

    def being_read(self) -> set[str]:
        """Return the names of sessions that it reads."""
        return {session_id for _, session_id in self.shared._loading}

    def being_deleted(self) -> list[str]:
        """Return the names of sessions that it deletes."""
        held = self.site.server.tables.sessions
        hidden = self.store.deletions.hidden
        return [held[number].row.session_id for number in sorted(hidden) if number in held]

    def check_lease(self) -> None:
        """Raise Broken if it answers for what the database has given up already: clocks go no
        more wrong than the margin of a lease."""
        is_held = self.clock.local_s(self.site.schedule.now_s) < self.lease._until_s
        if self.state == "up" and is_held and not self.site.server.is_live(self.me):
            raise Broken("lease", f"{self.name} answers as {self.me}, whose lease is over")

    def has_strayed(self, name: str) -> bool:
        """Return whether it has a session in memory which the database says is not its own."""
        server, session = self.site.server, self._find(name)
        if session is None or session.life.log is None:
            return False
        held = server.tables.sessions.get(session.life.order)
        return held is not None and not (held.holder == self.me and server.is_live(self.me))

    @property
    def me(self) -> int:
        """Return the id that the database knows it by."""
        database = self.lease.database
        assert isinstance(database, SimDatabase)
        return database.replica_id

    @property
    def store(self) -> SessionStore:
        """Return its store."""
        store = self.manager._flow.conclusion.logs.store
        assert store is not None
        return store

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.manager.tick()

    # -- running

    def deliver(self, run: Callable[[], None]) -> None:
        """Run something as soon as the process runs."""
        if self.state != "dead":
            self.loop.call_soon(run)
            self.run()

    def start(
        self, work: Coroutine[Any, Any, object], done: Callable[[asyncio.Task[Any]], None]
    ) -> asyncio.Task[Any]:
        """Have a request served."""
        task = self.loop.create_task(work)
        task.add_done_callback(done)
        self.site.schedule.after(0.0, self.run)
        return task

    def run(self) -> None:
        """Do what is to be done by now. Raises Broken for what nobody has expected."""
        if self.state != "up":
            return
        loop = self.loop
        loop.advance(max(0.0, self.clock.local_s(self.site.schedule.now_s) - loop.time()))
        for error in loop.errors:
            raise error if isinstance(error, Broken) else Broken("crash", repr(error)) from error
        engine = self.engine
        if not self._is_engine_due and (engine.commands or engine.events or engine.is_busy):
            self._is_engine_due = True
            loop.call_later(self.site.step_s, self._step_engine)
        timers = loop._scheduled  # type: ignore[attr-defined]  # a heap of asyncio's
        if timers:
            wake_s = self.clock.world_s(timers[0]._when) + _EPSILON_S
            if wake_s < self._wake_s:
                self._wake_s = wake_s
                self.site.schedule.at(wake_s, partial(self._wake, wake_s))

    def _wake(self, wake_s: float) -> None:
        if wake_s == self._wake_s:
            self._wake_s = math.inf
            self.run()

    def _step_engine(self) -> None:
        self._is_engine_due = False
        self.engine.step()
        self.engine.deliver()

    # -- what befalls it

    def pause(self) -> None:
        """Let it do nothing until `resume`: what is on its way arrives then."""
        if self.state == "up":
            self.state = "paused"

    def resume(self) -> None:
        """Let it go on: its clock has gone on too."""
        if self.state == "paused":
            self.state = "up"
            self._wake_s = math.inf
            self.run()

    def kill(self) -> None:
        """Let it end as `kill -9` does: what it has sent may still arrive."""
        if self.state == "dead":
            return
        self.state = "dead"
        self.link.mode = "silent"
        for _ in range(8):
            for task in list(self.loop.tasks):
                task.cancel()
            self.loop.drain()
        self.loop.close()

    async def end(self) -> None:
        """End as SIGTERM does."""
        await self.manager.drain(1.0)
        await self.manager.stop()
        await self.store.close()
