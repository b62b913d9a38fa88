"""`Weather`: what befalls replicas, their clocks and their ways to the database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tests.sim.draws import Draws
from tests.sim_replicas.link import UNANSWERED_S, Mode, Part
from tests.sim_replicas.process import Clock, Migration, Process
from tests.sim_replicas.schedule import Schedule
from tests.sim_replicas.server import DatabaseServer

_KINDS = (
    *("pause", "cut", "migrate", "crash", "stop", "slow"),
    *("engine", "wall", "database", "lossy", "late"),
)
_WEIGHTS = (170, 310, 490, 550, 600, 650, 710, 750, 770, 880, 1000)
"""Running sums."""


class Machine(Protocol):
    """Name a machine on which a replica lives again and again."""

    process: Process | None
    wall_ahead_s: float

    def start(self, clock: Clock) -> None:
        """Start a replica."""

    def stop(self) -> None:
        """End it as SIGTERM does."""


class Weather:
    """Let one thing after another go wrong, and right again, until `end`."""

    def __init__(
        self, machines: Sequence[Machine], schedule: Schedule, server: DatabaseServer, draws: Draws
    ) -> None:
        self._machines, self._schedule, self._server = machines, schedule, server
        self._draws, self._reached = draws, server.reached
        self.is_over = False
        self.every_ms = 4000
        self.skew = 0

    def clock(self) -> Clock:
        """Return a clock that goes as wrong as it may."""
        rate = 1.0 + self._draws.between("skew", -self.skew, self.skew) / 1000
        return Clock(rate, self._schedule.now_s)

    def begin(self) -> None:
        """Have something go wrong after a while."""
        if not self.is_over:
            delay_s = self._draws.between("calm", 1, self.every_ms) / 1e3
            self._schedule.after(delay_s, self._strike)

    def _strike(self) -> None:
        if self.is_over:
            return
        machine = self._draws.pick("machine", self._machines)
        busy = [each for each in self._machines if each.process and each.process.is_moving]
        if busy and self._draws.happens("where sessions move", 400):
            machine = self._draws.pick("which of those", busy)
        kind = self._draws.weighted("fault", _KINDS, _WEIGHTS)
        long = self._draws.happens("long fault", 500)
        for_s = self._draws.between("fault lasts", 50, 18_000 if long else 2500) / 1e3
        process = machine.process
        if process is not None and process.state == "up":
            self._reached[f"fault: {kind}"] += 1
            getattr(self, f"_{kind}")(machine, process, for_s)
        self.begin()

    def _pause(self, machine: Machine, process: Process, for_s: float) -> None:
        process.pause()
        self._schedule.after(for_s, process.resume)

    def _cut(self, machine: Machine, process: Process, for_s: float) -> None:
        mode: Mode = self._draws.pick("cut", ("refused", "silent", "deaf"))
        cut = [process]
        if self._draws.happens("partition", 200):
            each_part = self._draws.between("parts", 2, 5)
            others = (each.process for each in self._machines[::each_part])
            cut += [each for each in others if each and each.state == "up"]
            self._reached["partition"] += 1
        for each in cut:
            each.link.mode = mode
            self._server.asked.pop(each.me, None)
            self._schedule.after(for_s, partial(_mend, each))
        if mode == "refused" and self._draws.happens("goes silent", 500):
            # What was refused waits behind what is not answered.
            for each in cut:
                self._schedule.after(min(for_s, 1.0) / 2, partial(_silence, each))
            self._reached["fault: refused, then silent"] += 1

    def _migrate(self, machine: Machine, process: Process, for_s: float) -> None:
        # As another host takes a virtual machine over: refused, silent, frozen, and all is well.
        here = [each.process for each in self._machines if each.process and each.process.is_used]
        free = [each for each in here if each.migration is None]
        if not free:
            return
        self._reached["migration"] += 1
        process = self._draws.pick("who migrates", free)
        silent_s = self._draws.between("refused first", 100, 3000) / 1e3
        frozen_s = silent_s + self._draws.between("then silent", 50, 1500) / 1e3
        over_s = frozen_s + self._draws.between("then frozen", 4500, 8500) / 1e3
        process.link.mode, process.migration = "refused", Migration()
        self._server.asked.pop(process.me, None)
        for at_s, step in (
            (silent_s, _silence),
            (frozen_s, _freeze),
            (over_s, _thaw),
            (frozen_s + UNANSWERED_S, _arrive),  # what was not answered before fails only then
        ):
            self._schedule.after(at_s, partial(_go_on, process, process.migration, step))

    def _crash(self, machine: Machine, process: Process, for_s: float) -> None:
        machine.process = None
        process.kill()
        self._schedule.after(for_s, lambda: machine.start(self.clock()))

    def _stop(self, machine: Machine, process: Process, for_s: float) -> None:
        working = [each for each in self._machines if each.process and each.process.is_working]
        machine = self._draws.pick("who stops", working or [machine])
        machine.stop()
        self._schedule.after(20.0 + for_s, lambda: machine.start(self.clock()))

    def _slow(self, machine: Machine, process: Process, for_s: float) -> None:
        process.link.slow = self._draws.pick("how slow", (10.0, 100.0, 1000.0))
        self._schedule.after(for_s, lambda: _mend(process))

    def _lossy(self, machine: Machine, process: Process, for_s: float) -> None:
        process.link.lossy = self._draws.pick("how lossy", (20, 100, 300))
        self._schedule.after(for_s, lambda: _mend(process))

    def _late(self, machine: Machine, process: Process, for_s: float) -> None:
        # Longer than the margin of a lease, and questions also than anybody waits for them.
        part: Part = self._draws.pick("what is late", ("question", "answer"))
        process.link.late_s = {part: self._draws.between("by how much", 1000, 14_000) / 1e3}
        self._schedule.after(for_s, lambda: _mend(process))

    def _engine(self, machine: Machine, process: Process, for_s: float) -> None:
        engine = process.engine
        if engine.is_alive:
            engine.die()
            process.deliver(lambda: None)
            again = min(for_s, 3.0)
            self._schedule.after(again, lambda: process.deliver(lambda: _revive(process)))

    def _wall(self, machine: Machine, process: Process, for_s: float) -> None:
        machine.wall_ahead_s = self._draws.between("wall", -4000, 4000)

    def _database(self, machine: Machine, process: Process, for_s: float) -> None:
        self._server.end_all()

    def end(self) -> None:
        """Let all that is wrong be right, and nothing go wrong any more."""
        self.is_over = True
        for machine in self._machines:
            process = machine.process
            if process is None:
                machine.start(self.clock())
                continue
            process.migration = None
            _thaw(process)
            process.deliver(lambda process=process: _revive(process))  # type: ignore[misc]


def _go_on(process: Process, migration: Migration, step: Callable[[Process], None]) -> None:
    if process.migration is migration and process.state != "dead":
        step(process)


def _freeze(process: Process) -> None:
    if process.state == "up" and process.link.mode == "silent" and process.migration:
        process.migration.unwritten = frozenset(process.unwritten())
        process.pause()


def _thaw(process: Process) -> None:
    _mend(process)
    process.resume()


def _arrive(process: Process) -> None:
    process.migration = None


def _silence(process: Process) -> None:
    if process.state != "dead" and process.link.mode == "refused":
        process.link.mode = "silent"


def _mend(process: Process) -> None:
    if process.state != "dead":
        process.link.mend()


def _revive(process: Process) -> None:
    if not process.engine.is_alive:
        process.engine.come_up()
