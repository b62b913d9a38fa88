"""Replicas that share a store: one of them can write a session at a time, whoever was paused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import Final

import psycopg
import pytest
from msgspec import structs

from session_server.sessions.place_counter import SLOTS
from session_server.sessions.postgres import connections, leases, notifications
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.postgres.failures import is_unavailable
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.ownership import HeldBy, LeaseLost, Moved, NameTaken
from session_server.sessions.store.records import SessionRow
from tests.rig.postgres import Postgres

LATER_S = 4e9
LEASE_S = 60.0
SOON_S = 20.0
"""For what happens at once on a machine that is busy."""

Join = Callable[[], PostgresDatabase]
NEW = SessionRow(1, "alice", "s1", b"model", LATER_S, b"settings", 3, 1, 2, epoch=1)


@pytest.fixture
def join(url: str) -> Iterator[Join]:
    """Opens the store as another replica."""
    opened: list[PostgresDatabase] = []

    def make() -> PostgresDatabase:
        database = PostgresDatabase(url)
        opened.append(database)
        database.join(f"replica-{len(opened)}:30000", LEASE_S)
        return database

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def lapse(postgres: Postgres, url: str) -> Callable[[PostgresDatabase], None]:
    """Ends the lease of a replica by the clock of the database: it was paused for that long."""

    def end(database: PostgresDatabase) -> None:
        query = "UPDATE session_server.replicas SET expires = clock_timestamp() WHERE id = "
        postgres.run(query + str(database.replica_id), url)

    return end


def put(database: PostgresDatabase, row: SessionRow = NEW, *entries: bytes) -> SessionRow:
    with database.transaction():
        database.put(row, *entries)
    found = database.numbered(row.number)
    assert found is not None
    return found


def append(database: PostgresDatabase, row: SessionRow, *entries: bytes) -> SessionRow:
    with database.transaction():
        database.append(row, *entries)
    return structs.replace(
        row,
        num_entries=row.num_entries + len(entries),
        num_bytes=row.num_bytes + sum(map(len, entries)),
    )


def take(database: PostgresDatabase, name: str = "s1") -> SessionRow:
    found = database.take("alice", name)
    assert isinstance(found, SessionRow), found
    return found


def numbered(number: int, **given: float | str) -> SessionRow:
    return structs.replace(NEW, number=number, session_id=f"s{number}", **given)


# -- who holds a session


def test_one_replica_holds_a_session_and_the_others_are_told_which(join: Join) -> None:
    ours, others = join(), join()
    assert put(ours).epoch == 1
    assert others.take("alice", "s1") == HeldBy(1, ours.replica_id, "replica-1:30000")
    assert take(ours).epoch == 2  # and whoever wrote in epoch 1 is out
    with pytest.raises(Moved), ours.transaction():
        ours.append(NEW, b"x")
    ours.release([1])
    taken = take(others)
    assert taken.epoch == 3
    append(others, taken, b"x")
    assert ours.take("alice", "s1") == HeldBy(1, others.replica_id, "replica-2:30000")


def test_nobody_takes_what_is_not_there_or_has_expired(join: Join) -> None:
    ours, others = join(), join()
    assert ours.take("alice", "s1") is None
    put(ours, structs.replace(NEW, expires_s=5.0))
    # Whoever holds it knows whether it is still used.
    assert isinstance(others.take("alice", "s1"), HeldBy)
    assert ours.take("alice", "s1") is None
    ours.release([1])
    assert others.take("alice", "s1") is None


def test_a_replica_that_deletes_a_session_does_not_take_it(join: Join) -> None:
    ours = join()
    held = put(ours)
    assert ours.take("alice", "s1", {held.number}) is None
    with ours.transaction():  # whose epoch is the same
        assert ours.delete_some(held.number, held.epoch) is not None


def test_of_many_that_take_a_session_at_once_one_has_it(join: Join) -> None:
    replicas = [join() for _ in range(6)]
    put(replicas[0])
    replicas[0].release([1])
    barrier = threading.Barrier(len(replicas))

    def run(database: PostgresDatabase) -> SessionRow | HeldBy | None:
        barrier.wait()
        return database.take("alice", "s1")

    with ThreadPoolExecutor(len(replicas)) as threads:
        found = list(threads.map(run, replicas))
    ((winner, row),) = [
        (database, each)
        for database, each in zip(replicas, found, strict=True)
        if isinstance(each, SessionRow)
    ]
    assert row.epoch == 2
    held = {each for each in found if isinstance(each, HeldBy)}
    assert {each.replica_id for each in held} == {winner.replica_id}
    append(winner, row, b"x")


def test_a_replica_gives_up_what_it_holds_and_nothing_else(join: Join) -> None:
    ours, others = join(), join()
    put(ours)
    put(others, numbered(2))
    ours.release([1, 2, 3])
    ours.release([])
    assert isinstance(ours.take("alice", "s2"), HeldBy)
    assert take(others).epoch == 2


def test_a_replica_that_leaves_gives_up_everything(
    join: Join, postgres: Postgres, url: str
) -> None:
    ours, others = join(), join()
    count = leases.RELEASED_AT_ONCE * 2 + 1
    with ours.transaction():
        for number in range(1, count + 1):
            ours.put(numbered(number))
    ours.leave()
    query = "SELECT count(holder), (SELECT count(*) FROM session_server.replicas) FROM "
    assert postgres.run(f"{query} session_server.sessions", url) == [(0, 1)]
    assert take(others, f"s{count}").epoch == 2
    with pytest.raises(LeaseLost), ours.transaction():
        pass
    with pytest.raises(LeaseLost):
        ours.renew(LEASE_S)


def test_many_sessions_are_given_up_in_slices(join: Join) -> None:
    ours, others = join(), join()
    numbers = range(1, leases.RELEASED_AT_ONCE + 2)
    with ours.transaction():
        for number in numbers:
            ours.put(numbered(number))
    ours.release(numbers)
    assert [take(others, f"s{number}").epoch for number in (1, numbers[-1])] == [2, 2]


# -- a lease that is over


def test_a_stale_owner_cannot_commit(join: Join, lapse: Callable[..., None]) -> None:
    ours, others = join(), join()
    stale = put(ours, NEW, b"one")
    lapse(ours)
    taken = take(others)
    assert taken == structs.replace(stale, epoch=2)
    for write in (
        partial(ours.append, stale, b"late"),
        partial(ours.touch, stale),
        partial(ours.put, stale, b"late"),
        partial(ours.delete_some, 1),
        partial(ours.retire, 1),
    ):
        with pytest.raises(LeaseLost), ours.transaction():
            write()
    with pytest.raises(LeaseLost):
        ours.renew(LEASE_S)
    with pytest.raises(LeaseLost):
        ours.take("alice", "s1")
    assert others.entries(1) == [b"one"]
    append(others, taken, b"two")


def test_a_replica_that_comes_back_holds_nothing(join: Join, lapse: Callable[..., None]) -> None:
    ours, others = join(), join()
    stale = put(ours, NEW, b"one")
    first = ours.replica_id
    lapse(ours)
    again = ours.join("again", LEASE_S)
    assert again.replica_id > first
    for write in (
        partial(ours.append, stale, b"late"),
        partial(ours.touch, stale),
        partial(ours.put, stale, b"late"),
    ):
        with pytest.raises(Moved), ours.transaction():
            write()
    assert take(others).epoch == 2  # nobody was there to hold it
    with pytest.raises(Moved), ours.transaction():
        ours.delete_some(1)
    with pytest.raises(Moved), ours.transaction():
        ours.retire(1)
    assert others.entries(1) == [b"one"]


def test_a_lease_ends_by_the_clock_of_the_database_and_is_renewed_before(join: Join) -> None:
    ours, others = join(), join()
    put(ours)
    ours.renew(0.3)
    until_s = time.monotonic() + 0.3
    while isinstance(found := others.take("alice", "s1"), HeldBy):
        assert time.monotonic() < until_s + SOON_S
        time.sleep(0.02)
    assert time.monotonic() > until_s - 0.05
    assert isinstance(found, SessionRow)
    with pytest.raises(LeaseLost):
        ours.renew(LEASE_S)


def test_a_lease_that_is_being_renewed_is_not_over(
    join: Join, lapse: Callable[..., None], url: str
) -> None:
    """The statement that renews it began in time, and is not committed yet."""
    ours, others = join(), join()
    row = put(ours)
    lapse(ours)
    with ThreadPoolExecutor(1) as threads:
        with psycopg.connect(url) as connection:
            query = "UPDATE session_server.replicas SET expires = expires + '60s' WHERE id = %s"
            connection.execute(query, (ours.replica_id,))
            taking = threads.submit(others.take, "alice", "s1")
            assert_waits(taking)
        assert isinstance(taking.result(SOON_S), HeldBy)
    append(ours, row, b"one")


def test_a_lease_is_renewed_while_every_connection_reads(join: Join) -> None:
    ours, num = join(), connections.MAX_READERS
    wait = threading.Event()

    def read(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        connection.execute("SELECT")
        assert wait.wait(SOON_S)

    with ThreadPoolExecutor(num) as threads:
        reading = [threads.submit(ours._over_pool, read) for _ in range(num)]
        try:
            assert_waits(reading[-1])
            begun_s = time.monotonic()
            ours.renew(LEASE_S)
            assert time.monotonic() < begun_s + connections.READ_WAIT_S / 2
        finally:
            wait.set()
        for each in reading:
            each.result(SOON_S)


def test_a_lease_is_renewed_over_another_connection_where_one_says_nothing(
    join: Join, url: str
) -> None:
    ours = join()
    first, lease_s = ours._own._connection, 2.4
    row = "SELECT FROM session_server.replicas FOR UPDATE"
    with psycopg.connect(url) as other, ThreadPoolExecutor(1) as threads:
        other.execute(row)
        renewing = threads.submit(ours.renew, lease_s)
        time.sleep(lease_s / 2)
        assert first is not None
        assert first.closed
        other.rollback()
        assert renewing.result(SOON_S) > 0
    assert ours._own._connection is not first


def test_time_is_that_of_the_database(join: Join, postgres: Postgres) -> None:
    ours = join()
    query = "SELECT extract(epoch FROM clock_timestamp())::double precision"
    ((before_s,),) = postgres.run(query)
    now_s = ours.renew(LEASE_S)
    ((after_s,),) = postgres.run(query)
    assert before_s <= now_s <= after_s
    assert after_s <= ours.join("again", LEASE_S).now_s <= after_s + SOON_S


# -- a commit under way


def assert_waits(future: object) -> None:
    with pytest.raises(NotYet):
        future.result(0.3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_written_before", [True, False])
def test_a_commit_under_way_is_awaited_and_then_there(
    join: Join, lapse: Callable[..., None], *, is_written_before: bool
) -> None:
    """The old owner is paused in a transaction: what it commits is in what the new one reads."""
    ours, others = join(), join()
    row = put(ours, NEW, b"one")
    with ThreadPoolExecutor(1) as threads:
        with ours.transaction():
            if is_written_before:
                ours.append(row, b"two")
            lapse(ours)
            taking = threads.submit(take, others)
            assert_waits(taking)
            if not is_written_before:
                ours.append(row, b"two")
        taken = taking.result(SOON_S)
    assert (taken.epoch, taken.num_entries) == (2, 2)
    assert others.entries(1) == [b"one", b"two"]
    with pytest.raises(LeaseLost), ours.transaction():
        ours.append(structs.replace(row, num_entries=2), b"three")


def test_a_commit_that_is_undone_is_not_there(join: Join, lapse: Callable[..., None]) -> None:
    ours, others = join(), join()
    row = put(ours, NEW, b"one")
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(KeyError), ours.transaction():  # noqa: PT012
            ours.append(row, b"two")
            lapse(ours)
            taking = threads.submit(take, others)
            assert_waits(taking)
            raise KeyError
        assert taking.result(SOON_S).num_entries == 1


def test_an_owner_that_hangs_in_a_commit_holds_nobody_up_for_long(
    join: Join, lapse: Callable[..., None]
) -> None:
    ours, others = join(), join()
    row = put(ours, NEW, b"one")
    ours._writer.execute("SET idle_in_transaction_session_timeout = '300ms'")
    with pytest.raises(psycopg.Error) as failed, ours.transaction():  # noqa: PT012
        ours.append(row, b"two")
        lapse(ours)
        assert take(others).num_entries == 1
    assert is_unavailable(failed.value)
    assert others.entries(1) == [b"one"]
    with pytest.raises(LeaseLost), ours.transaction():
        ours.append(row, b"two")


def test_nobody_waits_for_a_commit_to_hear_who_holds_a_session(join: Join) -> None:
    ours, others = join(), join()
    row = put(ours)
    with ThreadPoolExecutor(1) as threads, ours.transaction():
        ours.append(row, b"two")
        found = threads.submit(others.take, "alice", "s1").result(SOON_S)
        assert isinstance(found, HeldBy)


def test_a_lease_is_renewed_while_a_commit_goes_on(join: Join) -> None:
    ours = join()
    row = put(ours)
    with ThreadPoolExecutor(1) as threads, ours.transaction():
        ours.append(row, b"two")
        threads.submit(ours.renew, LEASE_S).result(SOON_S)


def test_a_replica_joins_while_one_that_is_over_commits(
    join: Join, lapse: Callable[..., None]
) -> None:
    ours = join()
    row = put(ours)
    with ours.transaction():
        ours.append(row, b"two")
        lapse(ours)
        with ThreadPoolExecutor(1) as threads:
            others = threads.submit(join).result(SOON_S)
    assert take(others).num_entries == 1


def test_what_commits_beside_a_take_is_of_one_epoch_each(join: Join, postgres: Postgres) -> None:
    """Two replicas take a session from each other as fast as they can, and write whenever they have
    it: no entry is lost, and epochs only rise."""
    replicas = [join(), join()]
    put(replicas[0])
    replicas[0].release([1])
    barrier = threading.Barrier(2)

    def run(database: PostgresDatabase) -> int:
        num_written = 0
        barrier.wait()
        until_s = time.monotonic() + SOON_S
        while num_written < 40:
            assert time.monotonic() < until_s
            found = database.take("alice", "s1")
            if isinstance(found, SessionRow):
                append(database, found, b"%d" % database.replica_id)
                database.release([1])
                num_written += 1
        return num_written

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, replicas)) == [40, 40]
    assert len(replicas[0].entries(1)) == 80
    query = "SELECT epoch FROM session_server.entries ORDER BY session, position"
    epochs = [epoch for (epoch,) in postgres.run(query, replicas_url(postgres, replicas[0]))]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) == 80


def replicas_url(postgres: Postgres, database: PostgresDatabase) -> str:
    return postgres.url(database._writer.info.dbname)


# -- joining


def test_twenty_that_join_at_once_have_slots_of_their_own(url: str, join: Join) -> None:
    join()
    opened = [PostgresDatabase(url) for _ in range(20)]
    barrier = threading.Barrier(len(opened))

    def run(database: PostgresDatabase) -> tuple[int, int]:
        barrier.wait()
        joined = database.join("here", LEASE_S)
        return joined.slot, joined.replica_id

    try:
        with ThreadPoolExecutor(len(opened)) as threads:
            slots, ids = zip(*threads.map(run, opened), strict=True)
    finally:
        for each in opened:
            each.close()
    assert sorted(slots) == list(range(1, 21))
    assert len(set(ids)) == 20


def test_a_slot_is_free_once_its_replica_has_left_or_is_over(
    join: Join, lapse: Callable[..., None]
) -> None:
    first, second, third = join(), join(), join()
    second.leave()
    assert second.join("again", LEASE_S).slot == 1
    lapse(first)
    assert third.join("again", LEASE_S).slot == 0


def test_too_many_replicas_are_refused(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_REPLICAS", 2)
    join()
    join()
    with pytest.raises(StoreUnusable, match="2 replicas share it"):
        join()


def test_whoever_has_not_joined_writes_nothing(url: str) -> None:
    database = PostgresDatabase(url)
    try:
        with pytest.raises(LeaseLost), database.transaction():
            database.put(NEW)
        with pytest.raises(LeaseLost):
            database.take("alice", "s1")
        with pytest.raises(LeaseLost):
            database.asked(0.0)
        assert database.last_number() == 0
    finally:
        database.close()


# -- putting


def test_of_two_that_open_a_name_at_once_one_has_it(join: Join) -> None:
    replicas = [join(), join()]
    barrier = threading.Barrier(2)

    def run(database: PostgresDatabase, number: int) -> bool:
        barrier.wait()
        try:
            put(database, structs.replace(NEW, number=number), b"x")
        except NameTaken:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        for turn in range(20):
            numbers = (2 * turn + 1, 2 * turn + 2)
            won = list(threads.map(run, replicas, numbers))
            assert sorted(won) == [False, True]
            found = replicas[0].find("alice", "s1")
            assert found is not None
            assert found.number == numbers[won.index(True)]
            winner = replicas[won.index(True)]
            with winner.transaction():
                winner.delete_some(found.number)


def test_a_name_is_taken_by_a_session_that_is_inserted_and_not_committed(join: Join) -> None:
    ours, others = join(), join()
    with ThreadPoolExecutor(1) as threads:
        with ours.transaction():
            ours.put(NEW)
            putting = threads.submit(put, others, structs.replace(NEW, number=2))
            assert_waits(putting)
        with pytest.raises(NameTaken):
            putting.result(SOON_S)
    put(others, numbered(3))


def test_a_name_is_free_once_its_session_has_expired_and_nobody_holds_it(
    join: Join, lapse: Callable[..., None]
) -> None:
    ours, others = join(), join()
    stale = put(ours, structs.replace(NEW, expires_s=5.0))
    with pytest.raises(NameTaken):
        put(others, structs.replace(NEW, number=2))
    lapse(ours)
    new = put(others, structs.replace(NEW, number=2))
    assert others.find("alice", "s1") == new
    renamed = others.numbered(1)
    assert renamed is not None
    assert (renamed.session_id, renamed.expires_s, renamed.epoch) == ("s1/1", 1.0, stale.epoch + 1)


def test_a_session_is_written_whole_whether_or_not_it_was_there(join: Join) -> None:
    ours, others = join(), join()
    for _ in range(2):
        put(ours, NEW, b"one", b"two")
    ours.release([1])
    taken = take(others)
    for _ in range(2):
        put(others, taken, b"all")
    with pytest.raises(Moved), ours.transaction():
        ours.put(NEW, b"late")
    assert ours.entries(1) == [b"all"]


def test_a_session_that_another_has_deleted_does_not_come_back(join: Join) -> None:
    ours, others = join(), join()
    put(ours)
    ours.release([1])
    taken = take(ours)
    ours.release([1])
    with others.transaction():
        others.delete_some(1)
    for write in (ours.put, ours.append, ours.touch):
        with pytest.raises(Moved), ours.transaction():
            write(taken)
    assert ours.numbered(1) is None


def test_a_number_of_another_session_is_not_written_over(join: Join) -> None:
    ours, others = join(), join()
    first = put(ours, NEW, b"one")
    for database in (ours, others):
        with pytest.raises(Moved), database.transaction():
            database.put(structs.replace(NEW, session_id="other"), b"x")
    assert ours.numbered(1) == first


# -- deleting


def test_each_of_those_that_nobody_holds_is_one_replicas_to_end(
    join: Join, lapse: Callable[..., None]
) -> None:
    replicas = [join() for _ in range(3)]
    numbers = [number * SLOTS for number in range(1, 61)]  # as one replica gives them
    for number in numbers:
        put(replicas[0], numbered(number, expires_s=5.0))
    replicas[0].release(numbers)

    def shares() -> list[list[int]]:
        found = [each.expired((0.0, 0), 10.0, limit=99) for each in replicas]
        return [[row.number for row in rows] for rows in found]

    assert sorted(number for share in shares() for number in share) == numbers
    assert min(map(len, shares())) > 0
    lapse(replicas.pop(1))
    assert sorted(number for share in shares() for number in share) == numbers
    # What one of them holds, or one that is over has held, is read once too.
    put(replicas[1], numbered(1, expires_s=5.0))
    assert sorted(number for share in shares() for number in share) == [1, *numbers]


def test_what_another_replica_holds_is_not_deleted(join: Join, lapse: Callable[..., None]) -> None:
    ours, others = join(), join()
    put(ours, structs.replace(NEW, expires_s=5.0), b"one")
    put(ours, numbered(2, expires_s=6.0))
    put(others, numbered(3, expires_s=7.0))
    assert [row.number for row in ours.expired((0.0, 0), 10.0, limit=9)] == [1, 2]
    assert [row.number for row in others.expired((0.0, 0), 10.0, limit=9)] == [3]
    for write in (others.delete_some, others.retire):
        with pytest.raises(Moved), others.transaction():
            write(1)
    lapse(ours)
    assert [row.number for row in others.expired((0.0, 0), 10.0, limit=9)] == [1, 2, 3]
    with others.transaction():
        assert others.retire(1) == 3
        assert others.delete_some(2) is not None


@pytest.mark.parametrize("is_retired", [True, False])
def test_what_somebody_has_held_since_is_not_deleted(join: Join, *, is_retired: bool) -> None:
    ours, others = join(), join()
    before = put(ours, NEW, b"one")
    ours.release([1])
    taken = take(others)
    append(others, taken, b"two")
    others.release([1])
    delete = ours.retire if is_retired else ours.delete_some
    with pytest.raises(Moved), ours.transaction():
        delete(1, before.epoch)
    assert ours.entries(1) == [b"one", b"two"]
    with ours.transaction():
        assert delete(1, taken.epoch)
    with ours.transaction():  # an earlier attempt, whose answer was lost
        delete(1, taken.epoch)
    left = ours.numbered(1)
    assert left is None or left.is_retired


@pytest.mark.parametrize("num_entries", [1, 100])
@pytest.mark.parametrize("is_retired", [True, False])
def test_what_is_deleted_is_not_written_behind(
    join: Join, *, num_entries: int, is_retired: bool
) -> None:
    ours = join()
    row = put(ours, NEW, *[b"x"] * num_entries)
    with ours.transaction():
        ours.retire(1) if is_retired else ours.delete_some(1)
    left = ours.numbered(1)
    assert left is None or left.expires_s <= 0
    num_left = 0 if left is None else left.num_entries
    for write in (
        partial(ours.append, structs.replace(row, num_entries=num_left), b"late"),
        partial(ours.touch, structs.replace(row, num_entries=num_left)),
        *([partial(ours.put, row, b"late")] if left is not None else []),
    ):
        with pytest.raises(Moved), ours.transaction():
            write()
    assert ours.numbered(1) == left


def test_whose_deletion_has_begun_is_everybodys(join: Join) -> None:
    ours, others = join(), join()
    put(ours, NEW, *[b"x"] * 100)
    put(ours, numbered(2), b"one")
    with ours.transaction():
        freed = ours.delete_some(1)
        assert freed is not None
        assert not freed.is_gone
        ours.retire(2)
    with others.transaction():
        for number in (1, 2):
            freed = others.delete_some(number)
            assert freed is not None
            assert freed.is_gone


# -- asking


def test_a_replica_is_asked_for_a_session_and_gives_it_up(join: Join) -> None:
    ours, others = join(), join()
    put(ours)
    held = others.take("alice", "s1")
    assert isinstance(held, HeldBy)
    with ThreadPoolExecutor(1) as threads:
        assert ours.asked(0.0) == []  # it listens from now on
        asking = threads.submit(ours.asked, SOON_S)
        assert_waits(asking)
        begun_s = time.monotonic()
        for _ in range(2):
            others.ask_for([held])
        assert asking.result(SOON_S) == [1]
        assert time.monotonic() < begun_s + SOON_S / 2
    ours.release([7, 1])
    assert take(others).epoch == 2


def test_waiting_is_bounded(join: Join) -> None:
    assert join().asked(0.05) == []


ODD: Final = ("", "{", "1,2", "-1", "1.0", " 1", chr(0x661), "9" * 19, "9" * 5000, "null", "")


def test_what_others_say_there_that_is_no_number_is_nothing(
    join: Join, postgres: Postgres, url: str
) -> None:
    ours = join()
    assert ours.asked(0.0) == []
    channel = notifications.channel_of(ours.replica_id)
    for payload in (*ODD, str(2**63), str(2**63 - 1), "7"):
        postgres.run(f"SELECT pg_notify('{channel}', '{payload}')", url)
    found, until_s = list[int](), time.monotonic() + SOON_S
    while len(found) < 2 and time.monotonic() < until_s:
        found += ours.asked(1.0)
    assert found == [2**63 - 1, 7]


def test_whoever_listens_over_a_connection_that_breaks_is_told_and_listens_again(
    join: Join, postgres: Postgres
) -> None:
    others = join()
    query = (  # it listens, and asks nothing now and then to see whether anybody answers
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE query LIKE 'LISTEN%' OR query = 'SELECT'"
    )
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(others.asked, SOON_S)
        assert_waits(asking)
        assert len(postgres.run(query)) == 1
        assert isinstance(asking.exception(SOON_S), psycopg.OperationalError)
    assert others.asked(0.0) == []
    others.ask_for([HeldBy(9, others.replica_id, "")])
    assert others.asked(SOON_S) == [9]


def test_whoever_waits_is_told_of_the_end(join: Join) -> None:
    others = join()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(others.asked, SOON_S)
        assert_waits(waiting)
        listener = others._listener
        assert listener is not None
        others.leave()
        assert waiting.result(SOON_S) == []
        assert listener._kept._connection is None
        with pytest.raises(LeaseLost):
            listener.asked(0.0)


def test_who_has_joined_again_is_not_asked_what_was_asked_of_the_one_before(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = join()
    assert ours.asked(0.0) == []
    listener = ours._listener
    assert listener is not None
    monkeypatch.setattr(notifications, "_SLICE_S", SOON_S)
    before = ours.replica_id
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ours.asked, SOON_S)
        assert_waits(waiting)
        ours.join("again", LEASE_S)
        ours.ask_for([HeldBy(9, before, "")])
        assert waiting.result(SOON_S) == []


def test_nobody_waits_for_whoever_listens_to_join_again(join: Join) -> None:
    ours = join()
    assert ours.asked(0.0) == []
    listener = ours._listener
    assert listener is not None
    with listener._kept._using:  # it asks a server that does not answer
        begun_s = time.monotonic()
        ours.join("again", LEASE_S)
        assert time.monotonic() < begun_s + SOON_S / 4
    listener.close()  # as whoever listens does then
    assert listener._kept._connection is None
    assert ours.asked(0.0) == []
