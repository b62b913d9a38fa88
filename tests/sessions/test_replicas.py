"""Several replicas, each a manager over an engine on paper, share a store in PostgreSQL."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from session_server.core.errors import (
    ServerBusy,
    ServerDraining,
    SessionExists,
    SessionMoved,
    SessionNotFound,
)
from session_server.core.owner import Owner
from session_server.core.session_events import TurnEnd
from session_server.sessions import session_logs, shared_sessions
from session_server.sessions.backlog import SLICE
from session_server.sessions.place_counter import SLOTS
from session_server.sessions.postgres import leases
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.session import Session
from session_server.sessions.shared_sessions import (
    HANDOVER_WAIT_S,
    RECOUNT_S,
    SharedSessions,
)
from session_server.sessions.store import session_store
from session_server.sessions.store.lease import ReplicaLease
from session_server.sessions.store.ownership import HeldBy, Joined, LeaseLost
from session_server.sessions.store.records import SessionRow
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.views import OpenRequest, SessionView
from tests.sessions.world import OWNER, World, completed, turn

LEASE_S = 3.0


@dataclass
class Replica:
    """A manager, and what it holds."""

    world: World
    store: SessionStore
    lease: ReplicaLease
    database: PostgresDatabase
    name: str
    turns: dict[str, int] = field(default_factory=dict)

    def say(self, session_id: str, turn_id: str, content: str = "Hello") -> TurnEnd:
        """Run a turn to its end, which is on disk."""
        self.world.submit(session_id, turn(turn_id, content))
        return self.finish(session_id, turn_id)

    def finish(self, session_id: str, turn_id: str) -> TurnEnd:
        self.world.engine.run()
        self.world.do(self.world.manager.stored())
        self.world.do(self.world.manager.load(OWNER, session_id))
        return self.world.end_of(session_id, turn_id)

    def history(self, session_id: str) -> tuple[int, ...]:
        self.world.do(self.world.manager.load(OWNER, session_id))
        return self.world.history(session_id)

    @property
    def shared(self) -> SharedSessions:
        shared = self.world.manager._sessions.on_disk
        assert isinstance(shared, SharedSessions)
        return shared

    @property
    def num_in_memory(self) -> int:
        return len(self.world.manager._sessions)


class Cluster:
    """Replicas on one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.loop = asyncio.new_event_loop()
        self.replicas: list[Replica] = []

    def start(self, lease_s: float = LEASE_S, quotas: QuotaLimits | None = None) -> Replica:
        name = f"http://replica-{len(self.replicas)}"
        database = PostgresDatabase(self.url)
        lease = ReplicaLease(database, address=name, lease_s=lease_s)
        lease.join()
        store = SessionStore(database, model=b"tokenizer", wall=lease.wall_s, lease=lease)
        world = World(store=store, loop=self.loop, quotas=quotas)
        store.start(self.loop)
        replica = Replica(world, store, lease, database, name)
        self.replicas.append(replica)
        return replica

    def stop(self, replica: Replica) -> None:
        """End a replica as SIGTERM does."""
        self.loop.run_until_complete(replica.world.manager.drain(0.0))
        self.loop.run_until_complete(replica.world.manager.stop())
        self.loop.run_until_complete(replica.store.close())
        self.replicas.remove(replica)

    def pause(self, replica: Replica) -> None:
        """Let a replica say nothing more, as one that is stopped or cut off."""
        for task in replica.lease._tasks:
            task.cancel()

    def until(self, condition: Callable[[], bool], wait_s: float = 10.0) -> None:
        async def wait() -> None:
            async with asyncio.timeout(wait_s):
                while not condition():
                    await asyncio.sleep(0.01)

        self.loop.run_until_complete(wait())


def lease_is_lost(_lease_s: float) -> float:
    raise LeaseLost


@pytest.fixture
def cluster(url: str) -> Iterator[Cluster]:
    made = Cluster(url)
    yield made
    for replica in list(made.replicas):
        made.stop(replica)
    made.loop.close()


def test_a_session_goes_on_in_another_replica_once_it_is_asked_for_there(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    history = first.world.history(name)
    assert second.history(name) == history
    assert first.num_in_memory == 0, "it was handed over, and not copied"
    completed(second.say(name, "b", "And now?"))
    longer = second.world.history(name)
    assert longer[: len(history)] == history
    assert first.history(name) == longer
    assert second.num_in_memory == 0
    # A turn that was said elsewhere is told again, and does not run.
    again = first.world.submit(name, turn("b", "And now?"))
    assert again.end is not None
    assert completed(again.end).outcome.is_durable
    assert first.history(name) == longer


def test_a_session_is_asked_for_again_where_nobody_has_heard_it(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    asked: list[Sequence[HeldBy]] = []
    ask_for = second.database.ask_for

    def deafly(held: Sequence[HeldBy]) -> None:
        asked.append(held)
        if len(asked) > 1:
            ask_for(held)

    second.database.ask_for = deafly  # type: ignore[method-assign]
    assert second.history(name) == ()
    assert len(asked) > 1


def test_a_running_turn_ends_before_its_session_is_handed_over(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    first.world.submit(name, turn("runs"))
    first.world.submit(name, turn("waits"))
    asking = cluster.loop.create_task(second.world.manager.load(OWNER, name))
    session = first.world.manager._sessions.find(OWNER, name)
    assert session is not None
    cluster.until(lambda: session.closing == "moved")
    with pytest.raises(SessionMoved):
        first.world.manager.edits.rewind(OWNER, name, None)
    for _ in range(2):
        first.world.engine.run()
        first.world.do(first.world.manager.stored())
    cluster.loop.run_until_complete(asking)
    end = completed(second.world.end_of(name, "runs"))
    assert end.outcome.is_durable
    assert completed(second.world.end_of(name, "waits")).outcome.is_durable, "none is cut"


def test_whoever_waits_for_a_session_to_leave_does_nothing_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    first.world.submit(name, turn("runs"))
    manager = first.world.manager
    session = manager._sessions.find(OWNER, name)
    assert session is not None
    manager.exits.give_up(session, is_lost=False)
    waiting = [cluster.loop.create_task(manager.load(OWNER, name)) for _ in range(50)]
    first.world.do(asyncio.sleep(0.1))
    num_looks, find = 0, manager._sessions.find

    def counted(owner: Owner, session_id: str) -> Session | None:
        nonlocal num_looks
        num_looks += 1
        return find(owner, session_id)

    monkeypatch.setattr(manager._sessions, "find", counted)
    first.world.do(asyncio.sleep(0.5))
    assert num_looks == 0
    first.world.engine.run()
    cluster.loop.run_until_complete(asyncio.gather(*waiting))
    assert manager._sessions.find(OWNER, name) not in (None, session), "it has left, and is back"
    assert not manager._sessions._awaited


def test_a_replica_that_says_nothing_loses_its_sessions(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    history = first.world.history(name)
    first.world.submit(name, turn("b"))
    cluster.pause(first)
    # Its lease ends, and the other one takes the session.
    assert second.history(name) == history
    completed(second.say(name, "c"))
    # It wakes up in the midst of its turn, which it cannot commit.
    told: list[str] = []
    journal = first.world.manager._sessions.find(OWNER, name)
    assert journal is not None
    first.world.engine.run()
    first.world.do(first.world.manager.stored())
    entries = [found.entry for found in journal.journal.read(journal.journal.first_seq - 1)]
    told = [entry.code for entry in entries if hasattr(entry, "code")]
    assert told == ["session_moved"], entries
    with pytest.raises(SessionMoved):
        first.world.manager.get(OWNER, name)
    assert first.num_in_memory == 0
    longer = second.world.history(name)
    assert len(longer) > len(history)
    assert second.history(name) == longer


def test_a_replica_that_lost_its_lease_begins_another_one(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    history = first.world.history(name)
    first.lease._tasks[0].cancel()
    cluster.until(lambda: not first.lease.is_held)
    first.lease._tasks.append(cluster.loop.create_task(first.lease._keep()))
    cluster.until(lambda: first.lease.is_held)
    assert first.num_in_memory == 0, "what it held may be others' by now"
    assert first.history(name) == history
    completed(first.say(name, "b"))
    longer = first.world.history(name)
    assert second.history(name) == longer


def test_a_replica_that_does_not_know_that_its_lease_is_over_tells_who_asks_to_ask_again(
    cluster: Cluster,
) -> None:
    first, second = cluster.start(), cluster.start()
    name = second.world.create(session_id="ours", is_stored=True)
    completed(second.say(name, "a"))
    cluster.pause(first)
    first.lease._until_s = math.inf  # it was stopped behind its check, and goes on
    time.sleep(1.5 * LEASE_S)
    with pytest.raises(SessionMoved):
        first.world.do(first.world.manager.load(OWNER, name))


def test_what_a_replica_could_not_write_is_not_told_to_be_on_disk(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    cluster.pause(first)
    assert second.history(name)
    first.lease._until_s = math.inf  # it was stopped behind its check, and goes on
    manager = first.world.manager
    view = manager.update(OWNER, name, metadata={"at": "1"})
    with pytest.raises(SessionMoved):
        first.world.do(manager.edits.stored_view(OWNER, view))
    with pytest.raises(SessionMoved):
        first.world.create(session_id="other", is_stored=True)


def cannot_write(replica: Replica) -> Callable[[], None]:
    """Have a replica read, and not write; return what puts that right."""
    conninfo, replica.database._conninfo = replica.database._conninfo, "host=/nowhere"
    replica.database._writer.close()

    def put_right() -> None:
        replica.database._conninfo = conninfo

    return put_right


def change_and_give_up(replica: Replica, name: str) -> None:
    """Change the settings of a session that others ask for meanwhile."""
    manager = replica.world.manager
    session = manager._sessions.find(OWNER, name)
    assert session is not None

    async def change() -> None:
        view = manager.update(OWNER, name, metadata={"at": "1"})
        telling = asyncio.create_task(manager.edits.stored_view(OWNER, view))
        await asyncio.sleep(0)
        manager.exits.give_up(session, is_lost=False)
        await telling

    replica.world.do(change())


def test_a_session_is_given_up_once_all_of_it_is_written(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    put_right = cannot_write(first)
    with pytest.raises(SessionMoved):
        change_and_give_up(first, name)
    first.world.do(asyncio.sleep(1.0))
    assert isinstance(second.database.take(OWNER.owner_id, name), HeldBy)
    put_right()
    cluster.loop.call_soon(first.world.manager.tick)
    assert second.history(name)
    assert second.world.manager.get(OWNER, name).metadata == {"at": "1"}
    use = first.world.manager.stats().store
    assert use is not None
    assert use.num_behind == 0


def test_what_cannot_be_written_before_a_handover_is_not_told_to_be_on_disk_and_holds_nobody_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_logs, "PART_WAIT_S", 0.2)
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    put_right = cannot_write(first)
    with pytest.raises(SessionMoved):
        change_and_give_up(first, name)
    assert second.history(name)
    assert second.world.manager.get(OWNER, name).metadata == {}
    put_right()


def test_a_replica_that_ends_with_what_it_could_not_write_releases_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_store, "CLOSE_WAIT_S", 0.1)
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    goes_on = threading.Event()
    first.store._commits.ask(lambda _database: goes_on.wait(10.0) and None, lambda _error: None)
    first.world.do(first.store.close())
    assert isinstance(second.database.take(OWNER.owner_id, name), HeldBy)
    goes_on.set()
    cluster.until(lambda: not first.store._commits._thread.is_alive())
    first.database.close()
    cluster.replicas.remove(first)


def test_what_a_lost_replica_could_not_write_waits_no_longer(cluster: Cluster) -> None:
    first = cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    put_right = cannot_write(first)
    manager = first.world.manager
    view = manager.update(OWNER, name, metadata={"at": "1"})
    assert first.world.do(manager.edits.stored_view(OWNER, view)).is_durable is False
    logs = manager._flow.conclusion.logs
    use = logs.use()
    assert use is not None
    assert use.num_behind == 1
    cluster.loop.call_soon(manager.exits.lose_all)
    cluster.until(lambda: first.num_in_memory == 0)
    first.world.do(manager.stored())
    use = logs.use()
    assert use is not None
    assert use.num_behind == 0, "it goes on elsewhere, without that"
    put_right()


def test_a_replica_joins_again_once_it_has_given_up_all_that_it_held(cluster: Cluster) -> None:
    first = cluster.start()
    for number in range(4 * SLICE):
        first.world.create(session_id=f"s{number}", is_stored=True)
    cluster.pause(first)
    first.lease._until_s = 0.0
    num_held: list[int] = []
    join = first.database.join

    def joining(address: str, lease_s: float, *, role: str) -> Joined:
        sessions = first.world.manager._sessions
        num_held.append(sum(session.closing is None for session in sessions))
        return join(address, lease_s, role=role)

    first.database.join = joining  # type: ignore[method-assign]
    first.world.do(first.lease._renew())
    assert num_held == [0], "what it held may be others' by now"


def test_a_replica_that_finds_no_slot_says_so_and_joins_once_there_is_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = cluster.start(lease_s=1.0)
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    history = first.world.history(name)
    with monkeypatch.context() as patched:
        patched.setattr(leases, "MAX_REPLICAS", 0)
        patched.setattr(first.database, "renew", lease_is_lost)
        cluster.until(lambda: first.store.failure is not None)
        assert "0 replicas share it: stop one" in str(first.store.failure)
        use = first.world.manager.stats().store
        assert use is not None
        assert use.is_failing
        with pytest.raises(SessionMoved):
            first.history(name)
        # What is in no store needs no lease.
        alone = first.world.create(session_id="alone")
        completed(first.say(alone, "a"))
        first.world.do(asyncio.sleep(2.0))
        assert not first.lease.is_held
        assert caplog.text.count("share it: stop one") == 1, "not with each attempt"
    cluster.until(lambda: first.lease.is_held)
    assert first.store.failure is None
    assert first.history(name) == history


def test_a_session_that_a_lost_replica_could_not_delete_is_not_told_to_be_gone(
    cluster: Cluster,
) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    cluster.pause(first)
    assert second.history(name)
    first.lease._until_s = math.inf  # it was stopped behind its check, and goes on
    session = first.world.manager._sessions.find(OWNER, name)
    assert session is not None
    with pytest.raises(SessionMoved):
        first.world.do(first.world.manager.exits.delete(OWNER, name))
    assert session.journal.is_suspended, "who listens is told of no end"
    completed(second.say(name, "b"))


def test_a_session_that_is_deleted_unread_and_was_taken_meanwhile_is_told_to_have_moved(
    cluster: Cluster,
) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    second.store.model = b"another tokenizer"
    take = second.database.take

    def take_and_lose(
        owner_id: str, session_id: str, without: Container[int]
    ) -> SessionRow | HeldBy | None:
        found = take(owner_id, session_id, without)
        if isinstance(found, SessionRow):
            second.database.release([found.number])
            assert isinstance(first.database.take(owner_id, session_id), SessionRow)
            first.database.release([found.number])
        return found

    second.database.take = take_and_lose  # type: ignore[method-assign]
    with pytest.raises(SessionMoved):
        second.world.do(second.world.manager.exits.delete(OWNER, name))
    second.database.take = take  # type: ignore[method-assign]
    assert second.world.do(second.world.manager.exits.delete(OWNER, name)).is_durable
    with pytest.raises(SessionNotFound):
        first.history(name)


def test_of_two_deletions_of_what_cannot_be_read_one_deletes_it(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    second.store.model = b"another tokenizer"
    exits = second.world.manager.exits
    both = [cluster.loop.create_task(exits.delete(OWNER, name)) for _ in range(2)]
    done = asyncio.gather(*both, return_exceptions=True)
    deleted, other = cluster.loop.run_until_complete(done)
    assert isinstance(deleted, SessionView), deleted
    assert deleted.is_durable
    assert isinstance(other, SessionNotFound | ServerBusy), "it is gone, or to be asked for again"
    with pytest.raises(SessionNotFound):
        first.history(name)


def test_who_waits_for_one_session_gives_up_another_meanwhile(cluster: Cluster) -> None:
    first, second, third = (cluster.start(lease_s=60.0) for _ in range(3))
    ours = second.world.create(session_id="ours", is_stored=True)
    theirs = third.world.create(session_id="theirs", is_stored=True)
    cluster.pause(third)
    waiting = cluster.loop.create_task(first.world.manager.load(OWNER, theirs))
    cluster.stop(second)
    taken = first.database.take(OWNER.owner_id, ours)  # and it is not in memory
    assert isinstance(taken, SessionRow)
    fourth = cluster.start()
    began_s = time.monotonic()
    assert fourth.history(ours) == ()
    assert time.monotonic() - began_s < HANDOVER_WAIT_S / 2
    assert not waiting.done()
    with pytest.raises(SessionMoved):
        cluster.loop.run_until_complete(waiting)


def hold_unread(replica: Replica, names: Sequence[str]) -> list[int]:
    """Have a replica hold sessions that are not in its memory; return their numbers."""
    for name in names:
        replica.world.create(session_id=name, is_stored=True)
    replica.world.do(replica.world.manager.stored())
    for session in list(replica.world.manager._sessions):
        replica.world.manager.exits._unload(session)
    found = [replica.database.find(OWNER.owner_id, name) for name in names]
    return [row.number for row in found if row is not None]


def test_however_many_wait_for_sessions_of_another_replica_each_is_taken_once_it_is_free(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_sessions, "HANDOVER_WAIT_S", 3.0)
    first, second = cluster.start(lease_s=60.0), cluster.start(lease_s=60.0)
    names = [f"s{number}" for number in range(40)]
    numbers = hold_unread(second, names)
    cluster.pause(second)
    takes, take, load = list[str](), first.database.take, first.world.manager.load

    def counted(owner_id: str, session_id: str, without: Container[int]) -> object:
        takes.append(session_id)
        return take(owner_id, session_id, without)

    first.database.take = counted  # type: ignore[assignment,method-assign]
    waiting = [cluster.loop.create_task(load(OWNER, name)) for name in names]
    first.world.do(asyncio.sleep(1.0))
    assert sorted(takes) == sorted(names), "of those that wait none is looked at by itself"
    second.database.release(numbers[1:])
    cluster.loop.run_until_complete(asyncio.gather(*waiting[1:]))
    assert first.num_in_memory == len(names) - 1
    assert len(takes) == 2 * len(names) - 1
    with pytest.raises(SessionMoved, match="http://replica-1"):
        cluster.loop.run_until_complete(waiting[0])


def test_all_that_others_ask_for_is_released_at_once_whatever_is_looked_for_meanwhile(
    cluster: Cluster,
) -> None:
    first = cluster.start(lease_s=60.0)
    numbers = hold_unread(first, [f"s{number}" for number in range(40)])
    goes_on, released, shared = threading.Event(), list[list[int]](), first.shared
    take, release = first.database.take, first.database.release

    def slowly(*asked: Any) -> SessionRow | HeldBy | None:
        goes_on.wait(10.0)
        return take(*asked)

    def noted(numbers: Sequence[int]) -> None:
        released.append(sorted(numbers))
        release(numbers)

    first.database.take, first.database.release = slowly, noted  # type: ignore[method-assign]
    load = first.world.manager.load
    loading = [cluster.loop.create_task(load(OWNER, name)) for name in ("s0", "s1", "none")]

    async def ask() -> None:
        await asyncio.sleep(0.05)
        num_before = len(shared._tasks)
        for number in numbers:
            shared._on_asked(number)
        assert len(shared._tasks) == num_before + 1, "not one for each"
        await asyncio.sleep(0.05)
        assert not released, "it may be what is being looked for"
        goes_on.set()

    first.world.do(ask())
    cluster.loop.run_until_complete(asyncio.wait(loading))
    cluster.until(lambda: not shared._tasks)
    assert released[0] == numbers[2:], "nobody reads these"
    assert sorted(each for (each,) in released[1:]) == numbers[:2], "they are given up once read"
    assert not shared._asked


def test_others_are_heard_again_behind_a_release_that_fails_as_none_should(
    cluster: Cluster,
) -> None:
    first, second = cluster.start(), cluster.start()
    hold_unread(first, ["ours"])
    release = first.database.release

    def cannot(_numbers: Sequence[int]) -> None:
        first.database.release = release  # type: ignore[method-assign]
        raise RuntimeError("can't start new thread")

    first.database.release = cannot  # type: ignore[method-assign]
    assert second.history("ours") == ()


def test_nobody_waits_in_a_replica_that_ends_for_a_session_of_another(cluster: Cluster) -> None:
    first, second = (cluster.start(lease_s=60.0) for _ in range(2))
    name = second.world.create(session_id="theirs", is_stored=True)
    cluster.pause(second)
    waiting = cluster.loop.create_task(first.world.manager.load(OWNER, name))
    first.world.do(asyncio.sleep(0.2))
    first.world.do(first.world.manager.drain(0.0))
    began_s = time.monotonic()
    with pytest.raises(ServerDraining):
        cluster.loop.run_until_complete(waiting)
    assert time.monotonic() - began_s < HANDOVER_WAIT_S / 2


def test_a_session_that_is_not_stored_needs_no_lease(cluster: Cluster) -> None:
    first = cluster.start()
    name = first.world.create()
    cluster.pause(first)
    first.lease._until_s = 0.0
    first.world.submit(name, turn("a"))
    first.world.engine.run()
    completed(first.world.end_of(name, "a"))


def test_numbers_are_of_the_clock_of_the_database(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cluster.start(), cluster.start()
    (now_s,) = first.database._read("SELECT extract(epoch FROM clock_timestamp())")[0]
    for replica, wrong_s in ((first, -1e6), (second, 1e6)):
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda wrong_s=wrong_s: float(now_s) + wrong_s)
            name = replica.world.create(session_id=f"s{wrong_s}", is_stored=True)
        completed(replica.say(name, "a"))
        found = replica.database.find(OWNER.owner_id, name)
        assert found is not None
        assert abs(found.number / SLOTS / 1e6 - float(now_s)) < 60.0
        # No clock but that one says how long it lives, either.
        assert abs(found.expires_s - float(now_s)) < 7 * 86_400.0
        assert (cluster.replicas[0].history(name)) == (cluster.replicas[1].history(name))


def test_an_id_is_taken_in_all_replicas(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    first.world.create(session_id="ours", is_stored=True)
    with pytest.raises(SessionExists):
        second.world.create(session_id="ours", is_stored=True)
    key = first.world.create(idempotency_key="key", is_stored=True)
    assert second.world.create(idempotency_key="key", is_stored=True) == key
    with pytest.raises(SessionNotFound):
        second.world.do(second.world.manager.exits.delete(OWNER, "nobody's"))


def test_an_id_that_another_replica_takes_is_not_told_to_be_open_where_it_is_deleted_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cluster.start(), cluster.start()
    request = OpenRequest(session_id="ours", is_stored=True)
    manager, sessions = second.world.manager, second.world.manager.exits.parts.sessions
    look_up = sessions.look_up

    async def look_up_early(owner: Owner, session_id: str) -> None:
        await look_up(owner, session_id)
        await first.world.manager.create(owner, request)

    async def delete() -> None:
        while sessions.find(OWNER, "ours") is None:
            await asyncio.sleep(0)
        await manager.exits.delete(OWNER, "ours")

    async def open_and_delete() -> list[object]:
        both = manager.create(OWNER, request), delete()
        return await asyncio.gather(*both, return_exceptions=True)

    monkeypatch.setattr(sessions, "look_up", look_up_early)
    opened, deleted = second.world.do(open_and_delete())
    assert isinstance(deleted, SessionMoved)
    assert isinstance(opened, SessionMoved)
    assert first.world.manager.get(OWNER, "ours").session_id == "ours"


def test_a_fork_has_the_id_that_was_asked_for_or_is_refused(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    second.world.create(session_id="taken", is_stored=True)
    edits = first.world.manager.edits
    with pytest.raises(SessionExists):
        first.world.do(edits.fork_as(OWNER, name, "taken"))
    view = first.world.do(edits.fork_as(OWNER, name, "copy"))
    assert first.world.do(edits.stored_view(OWNER, view)).session_id == "copy"
    with pytest.raises(SessionExists):
        first.world.do(edits.fork_as(OWNER, name, "copy"))
    other = first.world.do(edits.fork_as(OWNER, name, None))
    assert other.session_id not in (name, "copy")
    assert second.history("copy") == first.history(name)


def test_a_session_is_deleted_wherever_that_is_asked(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    view = second.world.do(second.world.manager.exits.delete(OWNER, name))
    assert view.is_durable
    for replica in (first, second):
        replica.world.do(replica.world.manager.load(OWNER, name))
        with pytest.raises(SessionNotFound):
            replica.world.manager.get(OWNER, name)
    second.world.create(session_id="ours", is_stored=True)


def test_sessions_of_all_replicas_are_listed(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    names = [
        replica.world.create(session_id=f"s{number}", is_stored=True)
        for number in range(3)
        for replica in (first, second)
        if number % 2 == (replica is second)
    ]
    for replica in (first, second):
        page = replica.world.do(replica.world.manager.list(OWNER))
        assert sorted(view.session_id for view in page.sessions) == sorted(names)


def test_what_owners_have_in_other_replicas_counts_some_time_later(cluster: Cluster) -> None:
    first, second = cluster.start(), cluster.start()
    first.world.create(session_id="mine", is_stored=True)
    names = [second.world.create(session_id=f"s{number}", is_stored=True) for number in range(5)]
    for name in names:
        completed(second.say(name, "a"))
    quotas = first.world.manager._quotas
    assert quotas.owned_sessions.held_by(OWNER) < 6
    first.world.now_s += RECOUNT_S
    cluster.loop.call_soon(first.world.manager.tick)
    cluster.until(lambda: quotas.owned_sessions.held_by(OWNER) == 6)
    assert quotas.stored_bytes.held_by(OWNER) >= second.world.manager._quotas.stored_bytes.total > 0


def test_what_a_replica_held_is_free_once_it_has_ended(cluster: Cluster) -> None:
    first, second = cluster.start(lease_s=60.0), cluster.start(lease_s=60.0)
    name = first.world.create(session_id="ours", is_stored=True)
    completed(first.say(name, "a"))
    history = first.world.history(name)
    cluster.stop(first)
    began_s = time.monotonic()
    assert second.history(name) == history
    assert time.monotonic() - began_s < 30.0, "its lease is not waited for"
