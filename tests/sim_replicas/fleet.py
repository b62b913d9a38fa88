"""What many replicas cost their database, and what becomes of the sessions of those that are lost.

Nothing goes wrong here but what is measured: users stay with the replica that has their session, as
behind a proxy that routes by its name, until a third of the replicas is killed at once. Then each
of their users asks another one, and again until it is served.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from session_server.core.sampling import SamplingParams
from session_server.core.session_events import TokenInput, TurnRequest
from tests.sim_replicas.process import Process
from tests.sim_replicas.simulation import Simulation, watched

SESSIONS_EACH: Final = 5
THINK_S: Final = (5, 15)
"""Between an answer and the next turn, evenly."""

WARM_S: Final = 20.0
MEASURED_S: Final = 60.0
MOVED_S: Final = 60.0
"""Within what time every session of a lost replica has to be served again."""

_AGAIN_S: Final = 0.25
_NOTICED_S: Final = 1.0
"""How long a user takes, at most, to notice that a replica is gone."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured. `moved_s`: how long each session of a lost replica was not served."""

    num_replicas: int
    counts: Counter[str]
    num_lost: int
    moved: Counter[str]
    moved_s: Sequence[float]

    def row(self) -> tuple[str, ...]:
        """Return a line of the table."""
        turns = self.counts["turns"]
        waited = sorted(self.moved_s)
        return (
            str(self.num_replicas),
            str(self.num_replicas * SESSIONS_EACH),
            f"{turns / MEASURED_S:.1f}",
            f"{self.counts['renewed'] / MEASURED_S:.1f}",
            f"{self.counts['log write'] / turns:.2f}",
            f"{self.counts['commit'] / turns:.2f}",
            str(self.num_lost),
            str(len(waited)),
            str(self.moved["taken from one that is over"] + self.moved["taken from nobody"]),
            str(self.moved["replica buried"]),
            f"{waited[len(waited) // 2]:.1f}",
            f"{waited[-1]:.1f}",
        )


COLUMNS: Final = (
    *("replicas", "sessions", "turns/s", "renewals/s", "log writes/turn", "commits/turn"),
    *("replicas lost", "sessions lost with them", "hand-overs", "leases buried"),
    *("half served again after s", "all after s"),
)


class _User:
    """Say something in one session every few seconds."""

    def __init__(self, fleet: Simulation, name: str, process: Process) -> None:
        self._fleet, self.name, self.process = fleet, name, process
        self._request: TurnRequest | None = None
        self._num_due = self.num_said = 0
        self.said_s = 0.0
        """When the last answer came."""

        fleet.judge.opened(name, ttl_s=3600.0)
        self._serve(fleet.requests.create(process, name, 3600.0))

    def _serve(self, work: Coroutine[object, object, object]) -> None:
        self.process.start(work, self._on_done)

    def say(self, within_s: float) -> None:
        """Send a turn, or the last one again if it was not answered."""
        draw = self._fleet.draws.between("thinking", 0, int(1e6 * within_s)) / 1e6
        self._num_due += 1
        self._fleet.schedule.after(draw, partial(self._send, self._num_due))

    def _send(self, number: int) -> None:
        if number != self._num_due:
            return  # asked anew meanwhile
        if self.process.state == "dead":
            self.process = self._fleet.draws.pick("another replica", self._fleet.processes())
        if self._request is None:
            turn_id = f"{self.name}/{self.num_said}"
            self._request = TurnRequest(turn_id, TokenInput((300,)), SamplingParams(max_tokens=4))
        judge = self._fleet.judge
        judge.sent(self.name, self._request.turn_id)
        work = self._fleet.requests.turn(self.process, judge.begin(self.name), self._request)
        self._serve(work)

    def _on_done(self, task: asyncio.Task[object]) -> None:
        if task.cancelled():  # its replica was killed: `lose` has it asked again
            return
        if (error := task.exception()) is not None:
            self.process.loop.errors.append(error)
            return
        if self._request is not None and not task.result():
            self.say(_AGAIN_S)
            return
        self.num_said += self._request is not None
        self._request, self.said_s = None, self._fleet.schedule.now_s
        first_s, last_s = THINK_S
        self._fleet.schedule.after(first_s, lambda: self._think(last_s - first_s))

    def _think(self, within_s: float) -> None:
        if self.process.state != "dead":
            self.say(within_s)


@contextmanager
def _counted(fleet: Simulation) -> Iterator[Counter[str]]:
    """Give what is reached in the block."""
    found: Counter[str] = Counter()
    before = fleet.server.reached.copy()
    yield found
    found.update(fleet.server.reached - before)


def measure(num_replicas: int, seed: int = 0) -> Measured:
    """Measure so many replicas. Raises Broken, AssertionError."""
    fleet = Simulation(seed, num_replicas)
    with watched() as bugs:
        try:
            for machine in fleet.machines:
                machine.start(fleet.weather.clock())
            homes = fleet.processes()
            num_users = num_replicas * SESSIONS_EACH
            users = [_User(fleet, f"s{n}", homes[n % num_replicas]) for n in range(num_users)]
            fleet.pass_s(WARM_S)
            said = sum(user.num_said for user in users)
            with _counted(fleet) as counts:
                fleet.pass_s(MEASURED_S)
            counts["turns"] = sum(user.num_said for user in users) - said
            num_lost = num_replicas // 3
            lost = [user for user in users if user.process in homes[:num_lost]]
            for machine in fleet.machines[:num_lost]:
                assert machine.process is not None, "nothing to kill"
                machine.process.kill()
                machine.process = None
            lost_s = fleet.schedule.now_s
            for user in lost:
                user.say(_NOTICED_S)
            with _counted(fleet) as moved:
                served_s = _served_again(fleet, lost, lost_s)
            assert not bugs.found, bugs.found[0].getMessage()
        finally:
            fleet.end()
    return Measured(num_replicas, counts, num_lost, moved, served_s)


def _served_again(fleet: Simulation, lost: Sequence[_User], lost_s: float) -> list[float]:
    """Wait until each of these was answered; return after how long."""
    served: dict[str, float] = {}
    while len(served) < len(lost):
        fleet.pass_s(0.1)
        assert fleet.schedule.now_s < lost_s + MOVED_S, "sessions of lost replicas are not served"
        for user in lost:
            if user.said_s > lost_s:
                served.setdefault(user.name, user.said_s - lost_s)
    return list(served.values())


def table(sizes: Sequence[int]) -> Iterator[str]:
    """Yield a Markdown table, line by line."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---:|' * len(COLUMNS)}"
    for num_replicas in sizes:
        yield f"| {' | '.join(measure(num_replicas).row())} |"
