"""What the simulator has found in the server, each as short as it could be made."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from session_server.core.commands import SubmitTurn
from session_server.core.errors import ServerBusy, SessionMoved, SessionServerError
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import TokenInput, TurnRequest
from session_server.sessions.store.disk_health import QUIET_S
from session_server.sessions.views import OpenRequest
from tests.sim.draws import Draws
from tests.sim_replicas.link import Waiting
from tests.sim_replicas.process import OWNER, Clock, Process, Site
from tests.sim_replicas.schedule import Schedule
from tests.sim_replicas.server import DatabaseServer
from tests.sim_replicas.simulation import UNIX_S, quotas, watched

_T = TypeVar("_T")


class Quiet:
    """Replicas to which nothing happens but what a test does."""

    def __init__(self) -> None:
        self.schedule = Schedule()
        self.server = DatabaseServer(lambda: UNIX_S + self.schedule.now_s)
        self.server.after = self.schedule.after
        waiting = Waiting(self.schedule, self.server)
        self.site = Site(self.schedule, self.server, waiting, Draws(0), quotas(), 0.002)
        self.processes: list[Process] = []

    def start(self) -> Process:
        """Start a replica."""
        clock = Clock(1.0, self.schedule.now_s)
        wall = self.server.clock
        made = Process(self.site, f"http://replica-{len(self.processes)}", clock, wall)
        self.processes.append(made)
        self.after(0.1)
        return made

    def after(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.schedule.now_s + seconds
        self.schedule.at(until_s, lambda: None)
        while self.schedule.now_s < until_s:
            self.schedule.step()

    def do(self, process: Process, work: Coroutine[Any, Any, _T]) -> _T:
        """Have a request served, and return its answer. Raises what it raises."""
        found: list[_T | SessionServerError] = []

        async def serve() -> None:
            try:
                found.append(await work)
            except SessionServerError as error:
                found.append(error)

        process.start(serve(), lambda _task: None)
        while not found:
            self.schedule.step()
        if isinstance(found[0], SessionServerError):
            raise found[0]
        return found[0]

    def open(self, process: Process, name: str) -> None:
        """Open a session, which is durable."""
        request = OpenRequest(session_id=name, is_stored=True)
        assert self.do(process, process.manager.create(OWNER, request)).is_durable

    def say(self, process: Process, name: str, turn_id: str) -> None:
        """Run a turn."""
        request = TurnRequest(turn_id, TokenInput((300,)), SamplingParams(max_tokens=2))
        self.do(process, process.manager.submit(OWNER, name, request))
        self.after(1.0)

    def end(self) -> None:
        """Kill all replicas."""
        for process in self.processes:
            process.kill()


@pytest.fixture
def quiet() -> Any:
    with watched():
        made = Quiet()
        yield made
        made.end()


def lose(quiet: Quiet, process: Process) -> None:
    """Let the lease of a replica be over, which it does not know yet."""
    quiet.server.members.clear()
    assert process.lease.is_held


def test_a_session_that_could_not_be_written_is_not_told_to_be_durable(quiet: Quiet) -> None:
    replica = quiet.start()
    lose(quiet, replica)
    request = OpenRequest(session_id="ours", is_stored=True)
    with pytest.raises(SessionMoved):
        quiet.do(replica, replica.manager.create(OWNER, request))


def test_who_asks_a_replica_that_has_lost_its_lease_is_told_to_ask_again(quiet: Quiet) -> None:
    first, second = quiet.start(), quiet.start()
    quiet.open(first, "ours")
    lose(quiet, second)
    with pytest.raises(SessionMoved):
        quiet.do(second, second.manager.load(OWNER, "ours"))


def test_a_database_that_does_not_answer_has_damaged_nothing(quiet: Quiet) -> None:
    first, second = quiet.start(), quiet.start()
    quiet.open(first, "ours")
    first.kill()
    quiet.after(10.0)

    def deafen() -> None:
        second.link.mode = "silent" if quiet.server.reached["taken from one that is over"] else "up"
        if second.link.mode == "up":
            quiet.schedule.after(0.0001, deafen)

    deafen()
    with pytest.raises(ServerBusy):
        quiet.do(second, second.manager.load(OWNER, "ours"))


def test_a_session_is_not_kept_whose_lease_is_lost_while_it_is_read(quiet: Quiet) -> None:
    first, second = quiet.start(), quiet.start()
    quiet.open(first, "ours")
    first.kill()
    quiet.after(10.0)

    def lose_once_taken() -> None:
        if quiet.server.reached["taken from one that is over"]:
            second.deliver(second.lease._lose)
        else:
            quiet.schedule.after(0.0001, lose_once_taken)

    lose_once_taken()
    with pytest.raises(SessionMoved):
        quiet.do(second, second.manager.load(OWNER, "ours"))
    quiet.after(4.0)
    assert second.lease.is_held, "another one"
    assert not list(second.manager._sessions)


def test_a_session_is_there_once_that_is_opened_while_it_is_looked_for(quiet: Quiet) -> None:
    replica = quiet.start()
    replica.link.late_s = {"question": 2.0}
    replica.start(replica.manager.load(OWNER, "ours"), lambda _task: None)
    quiet.after(0.1)
    replica.link.late_s = {}
    quiet.open(replica, "ours")
    quiet.after(4.0)
    (session,) = replica.manager._sessions
    assert session.life.log is not None
    assert session.life.log.hold.epoch == 1
    assert quiet.do(replica, replica.manager.exits.delete(OWNER, "ours")).is_durable
    assert quiet.do(replica, replica.manager.list(OWNER)).sessions == ()


def test_of_two_sessions_of_one_name_the_one_that_was_not_written_goes(quiet: Quiet) -> None:
    first, second = quiet.start(), quiet.start()
    first.start(
        first.manager.create(OWNER, OpenRequest("ours", is_stored=True)), lambda _task: None
    )
    while not first.has("ours"):
        quiet.schedule.step()
    first.link.mode = "silent"  # the name was free when it was looked for
    quiet.open(second, "ours")
    assert first.has("ours")
    first.link.mode = "up"
    quiet.after(15.0)
    assert not first.has("ours")
    number = second.number_of("ours")
    quiet.do(first, first.manager.load(OWNER, "ours"))
    assert first.number_of("ours") == number
    assert not second.has("ours")


def test_a_replica_without_a_lease_lists_nothing_of_what_it_remembers(quiet: Quiet) -> None:
    first, second = quiet.start(), quiet.start()
    quiet.open(first, "ours")
    first.link.mode = "silent"
    quiet.after(8.0)
    assert quiet.do(second, second.manager.exits.delete(OWNER, "ours")).is_durable
    first.link.mode = "up"
    try:
        page = quiet.do(first, first.manager.list(OWNER))  # its renewal still waits for an answer
    except SessionMoved:
        return
    assert page.sessions == ()


def test_a_deletion_that_was_refused_is_not_told_to_be_durable(quiet: Quiet) -> None:
    replica = quiet.start()
    quiet.open(replica, "ours")
    lose(quiet, replica)
    with pytest.raises(SessionMoved):
        quiet.do(replica, replica.manager.exits.delete(OWNER, "ours"))


def test_a_read_that_has_failed_counts_once(quiet: Quiet) -> None:
    replica = quiet.start()
    replica.link.mode = "silent"
    with pytest.raises(ServerBusy):
        quiet.do(replica, replica.manager.load(OWNER, "nobody's"))
    quiet.after(2.0)  # what has asked for expired sessions meanwhile fails too
    replica.link.mode = "up"
    assert replica.store.failure is not None
    quiet.after(QUIET_S + 5.0)
    assert replica.store.failure is None


def test_a_lost_session_whose_turn_is_being_cut_is_not_answered_for(quiet: Quiet) -> None:
    first, second = quiet.start(), quiet.start()
    quiet.open(first, "ours")
    quiet.site.step_s = 1000.0
    request = TurnRequest("a", TokenInput((300,)), SamplingParams(max_tokens=2))
    quiet.do(first, first.manager.submit(OWNER, "ours", request))
    lose(quiet, first)
    quiet.after(4.0)
    assert first.lease.is_held, "another one"
    assert quiet.do(second, second.manager.exits.delete(OWNER, "ours")).is_durable
    assert quiet.do(first, first.manager.list(OWNER)).sessions == ()
    with pytest.raises(SessionMoved):
        first.manager.snapshot(OWNER, "ours")


def test_a_turn_that_waits_in_a_lost_session_does_not_begin(quiet: Quiet) -> None:
    replica = quiet.start()
    quiet.open(replica, "ours")
    lose(quiet, replica)
    replica.link.slow = 1000.0
    replica.manager.update(OWNER, "ours", metadata={"a": "write that will be refused"})
    for turn_id in ("ends meanwhile", "waits"):
        request = TurnRequest(turn_id, TokenInput((300,)), SamplingParams(max_tokens=2))
        quiet.do(replica, replica.manager.submit(OWNER, "ours", request))
    quiet.after(4.0)
    sent = [each for each in replica.engine.seen if isinstance(each, SubmitTurn)]
    assert len(sent) == 1
    assert not list(replica.manager._sessions)


def test_what_waits_under_one_lease_is_not_written_under_the_next(quiet: Quiet) -> None:
    first, second = quiet.start(), quiet.start()
    for name in ("ours", "other"):
        quiet.open(first, name)

    def write(name: str) -> None:
        def change() -> None:
            first.manager.update(OWNER, name, metadata={"a": "change"})

        first.deliver(change)

    first.link.mode = "refused"
    write("ours")
    quiet.after(0.05)  # it could not be written: all of it will be, as of a new session
    first.link.mode = "silent"
    write("other")
    quiet.after(0.05)  # nothing is answered, and all others wait for it
    write("ours")
    first.link.mode = "up"
    lose(quiet, first)
    quiet.after(4.0)
    assert first.lease.is_held, "another one"
    assert quiet.do(second, second.manager.exits.delete(OWNER, "ours")).is_durable
    quiet.after(20.0)
    assert quiet.server.tables.named(OWNER.owner_id, "ours") is None
