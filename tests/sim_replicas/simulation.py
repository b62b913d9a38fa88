"""Simulate replicas that share a database, and check all that clients are told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from unittest import mock

from session_server.core.sampling import SamplingParams
from session_server.core.session_events import TokenInput, TurnRequest
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.store.disk_health import QUIET_S
from tests.sim.draws import Draws
from tests.sim_replicas.clients import Client
from tests.sim_replicas.faults import Weather
from tests.sim_replicas.judge import Broken, Judge
from tests.sim_replicas.link import Waiting
from tests.sim_replicas.process import Clock, Process, Site
from tests.sim_replicas.requests import Requests
from tests.sim_replicas.schedule import Schedule
from tests.sim_replicas.server import DatabaseServer
from tests.sim_replicas.tables import Change

UNIX_S: Final = 1_700_000_000.0
MAX_STEPS: Final = 6000
"""Of one seed, before all is put right."""

SETTLE_S: Final = QUIET_S + 30.0
"""Within what time every session can be used again once nothing goes wrong any more. A store that
could not be read counts as failing for a while, in which nothing leaves the memory for others."""

REST_S: Final = 30.0
"""After what time nothing is left of what replicas were doing."""


class Machine:
    """A place where a replica lives again and again."""

    def __init__(self, site: Site, name: str) -> None:
        self._site, self._name = site, name
        self.process: Process | None = None
        self.ending: list[Process] = []
        self.wall_ahead_s = 0.0

    def start(self, clock: Clock) -> None:
        """Start a replica."""
        if self.process is None:
            self.process = Process(self._site, self._name, clock, self._wall_s)

    def _wall_s(self) -> float:
        return UNIX_S + self._site.schedule.now_s + self.wall_ahead_s

    def stop(self) -> None:
        """End the replica as SIGTERM does."""
        process, self.process = self.process, None
        assert process is not None, "nothing to stop"
        self.ending.append(process)

        def done(_task: asyncio.Task[None]) -> None:
            self.ending.remove(process)
            self._site.schedule.after(0.0, process.kill)

        process.start(process.end(), done)


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulation came to. `coverage`: how often each thing happened."""

    seed: int
    steps: int
    coverage: Counter[str]


class Failure(Exception):
    """A simulation found a fault. `rule`: which one does not hold."""

    def __init__(self, seed: int, steps: int, broken: Broken) -> None:
        super().__init__(f"seed {seed}, step {steps}: {broken}")
        self.seed, self.steps, self.rule = seed, steps, broken.rule


class Simulation:
    """Replicas on machines, clients and weather. `num_replicas`: as drawn, if None."""

    def __init__(self, seed: int, num_replicas: int | None = None) -> None:
        self.schedule = Schedule()
        self.draws = draws = Draws(seed)
        self.server = server = DatabaseServer(lambda: UNIX_S + self.schedule.now_s)
        server.after = self.schedule.after
        self.judge = Judge(lambda: self.schedule.now_s)
        self._broken: Exception | None = None
        server.on_committed = self._committed
        self.requests = Requests(self.judge, server.reached)
        if num_replicas is None:
            num_replicas = draws.pick("replicas", (2, 3, 3, 3, 3, 3, 4, 5))
            if draws.happens("many replicas", 20):
                num_replicas = draws.between("how many", 20, 100)
        memory = draws.pick("memory", (10_000, 10_000, 4))
        site = Site(
            self.schedule,
            server,
            Waiting(self.schedule, server),
            draws,
            quotas(memory),
            draws.pick("engine step", (0.002, 0.02, 0.2)),
        )
        self.machines = [Machine(site, f"http://replica-{n}") for n in range(num_replicas)]
        self.weather = Weather(self.machines, self.schedule, server, draws)
        self.weather.skew = draws.pick("skews", (0, 20, 140))
        every_ms = draws.pick("weather", (1000, 4000, 16_000))
        self.weather.every_ms = every_ms // max(1, num_replicas // 10)
        self.max_sessions = draws.pick("sessions", (2, 4, 10))
        self.think_ms = draws.pick("pace", (20, 400))
        turns: dict[str, list[TurnRequest]] = {}
        num_clients = draws.between("clients", 2, 6) + num_replicas // 10
        self.clients = [Client(self, number, turns) for number in range(num_clients)]

    def _committed(self, changes: Sequence[Change]) -> None:
        try:
            self.judge.committed(changes)
        except Exception as error:  # noqa: BLE001 - from here it would be one of the database
            self._broken = self._broken or error

    def processes(self) -> Sequence[Process]:
        """Return the replicas that can be asked."""
        return [each.process for each in self.machines if each.process is not None]

    def run(self, max_steps: int) -> None:
        """Let all happen. Raises Broken."""
        for machine in self.machines:
            machine.start(self.weather.clock())
        for client in self.clients:
            client.begin()
        self.weather.begin()
        while self.schedule.num_steps < max_steps:
            self._step()
        self._settle()

    def pass_s(self, seconds: float) -> None:
        """Let so much time pass. Raises Broken."""
        until_s = self.schedule.now_s + seconds
        self.schedule.at(until_s, lambda: None)
        self._run_until(lambda: False, until_s)

    def _step(self) -> None:
        self.schedule.step()
        if self._broken is not None:
            raise self._broken

    # -- when all is right again

    def _settle(self) -> None:
        self.weather.end()
        for client in self.clients:
            client.is_over = True
        until_s = self.schedule.now_s + SETTLE_S
        self._run_until(lambda: all(client.is_idle for client in self.clients), until_s)
        left = {
            name: self.draws.pick("last replica", self.processes())
            for name, facts in self.judge.facts.items()
            if facts.is_there and not facts.may_go and facts.gone_s is None
        }
        for name, process in list(left.items()):
            self._use(name, process, left)
        self._run_until(lambda: not left, self.schedule.now_s + SETTLE_S)
        if left:
            raise Broken("stuck", f"{sorted(left)} cannot be used {SETTLE_S} s after all faults")
        self._rest()

    def _run_until(self, condition: object, until_s: float) -> None:
        assert callable(condition)
        while self.schedule.now_s < until_s and not condition():
            self._step()

    def _use(self, name: str, process: Process, left: dict[str, Process]) -> None:
        """Run one more turn in a session, until it is durable."""
        request = TurnRequest(f"{name}/last", TokenInput((300,)), SamplingParams(max_tokens=2))

        async def use() -> None:
            while True:
                self.judge.sent(name, request.turn_id)
                begun = self.judge.begin(name)
                if await self.requests.turn(process, begun, request):
                    break
                await asyncio.sleep(0.2)
            await self.requests.read(process, self.judge.begin(name))
            other = self.draws.pick("who knows it too", self.processes())
            other.start(know(other), partial(_tell, other))

        async def know(other: Process) -> None:
            facts = self.judge.facts[name]
            while facts.gone_s is None and not facts.may_go and not self.judge.may_expire(facts):
                if await self.requests.is_known(other, self.judge.begin(name)):
                    break
                await asyncio.sleep(0.2)
            left.pop(name)

        process.start(use(), partial(_tell, process))

    def _rest(self) -> None:
        self._run_until(lambda: False, self.schedule.now_s + REST_S)
        for process in self.processes():
            shared = process.shared
            tables = {name: getattr(shared, name) for name in ("_loading", "_leaving", "_asked")}
            tables["_unread.deleted"] = shared._unread.deleted
            tables["_lookout._waiting"] = shared._lookout._waiting
            tables["_tasks"] = [task for task in shared._tasks if not _is_recount(task)]
            kept = {name: value for name, value in tables.items() if value}
            if kept:
                raise Broken("left", f"{process.name} keeps {kept}")
            process.lease.check()
            if others := process.not_its_own():
                raise Broken("left", f"{process.name} has {others}, which are not its own")
        rows = {held.row.session_id: held.row for held in self.server.tables.sessions.values()}
        for name, facts in self.judge.facts.items():
            begun, row = self.judge.begin(name), rows.get(name)
            if facts.gone_s is not None:
                if row is not None and not self.server.is_over(row):
                    raise Broken("deleted", f"{name} is in the database")
            elif facts.is_there and not facts.may_go and not self.judge.may_expire(facts):
                if row is None:
                    raise Broken("lost", f"{name} is not in the database")
                self.judge.read(begun, self.judge.logs[row.number, name].items)

    def end(self) -> None:
        """Let all replicas end."""
        for machine in self.machines:
            for process in (machine.process, *machine.ending):
                if process is not None and process.state != "dead":
                    process.kill()


def _tell(process: Process, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        process.loop.errors.append(error)


class _Bugs(logging.Handler):
    """Collect what the server logs as a bug of ours."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if "a bug of ours" in str(record.msg) or "could not be told" in str(record.msg):
            self.found.append(record)


class _WallClock:
    """What modules of the server know as `time`."""

    @staticmethod
    def time() -> float:
        """Return the time of day in the replica that asks."""
        loop = asyncio.get_running_loop()
        wall_s: float = loop.wall_s()  # type: ignore[attr-defined]  # a `ReplicaLoop`
        return wall_s


def quotas(num_sessions: int = 10_000) -> QuotaLimits:
    """Return limits with room for so many sessions in memory."""
    return QuotaLimits(sessions=num_sessions)


@contextlib.contextmanager
def watched() -> Iterator[_Bugs]:
    """Have clocks be virtual, and what is logged as a bug of ours be collected."""
    bugs = _Bugs()
    logger = logging.getLogger("session_server")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(bugs)
    try:
        with mock.patch("session_server.sessions.opening.time", _WallClock):
            yield bugs
    finally:
        logger.removeHandler(bugs)
        logger.propagate = propagates


def run(seed: int, *, max_steps: int = MAX_STEPS, num_replicas: int | None = None) -> Report:
    """Simulate one seed, with as many replicas as it draws or so many. Raises Failure."""
    simulation = Simulation(seed, num_replicas)
    with watched() as bugs:
        try:
            simulation.run(max_steps)
            _check(bugs)
        except Broken as broken:
            raise Failure(seed, simulation.schedule.num_steps, broken) from broken
        except Exception as error:
            crash = Broken("crash", repr(error))
            raise Failure(seed, simulation.schedule.num_steps, crash) from error
        finally:
            simulation.end()
    return Report(seed, simulation.schedule.num_steps, simulation.server.reached)


def _check(bugs: _Bugs) -> None:
    if bugs.found:
        record = bugs.found[0]
        error = record.exc_info[1] if record.exc_info else None
        raise Broken("bug", f"{record.getMessage()}: {error!r}") from error


def _is_recount(task: asyncio.Task[None]) -> bool:
    """Return whether a task counts what owners have, which happens again and again."""
    return "SharedSessions._recount" in repr(task.get_coro())
