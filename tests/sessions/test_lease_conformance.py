"""What leases promise: those of PostgreSQL, and those of the simulated database alike."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.store.database import Behind
from session_server.sessions.store.ownership import HeldBy, LeaseLost, Moved, NameTaken
from session_server.sessions.store.records import (
    CONVERSATIONS,
    RESPONSES,
    Holding,
    RecordRow,
    SessionRow,
)
from tests.rig.postgres import Postgres
from tests.sim_replicas.database import SimDatabase
from tests.sim_replicas.server import DatabaseServer, Waits

Shared = PostgresDatabase | SimDatabase

LATER_S = 4e9
LEASE_S = 60.0
SOON_S = 20.0
NEW = SessionRow(1, "alice", "s1", b"model", LATER_S, b"settings", 3, 1, 2, epoch=1)


class Town(NamedTuple):
    """`join`: a further replica, with a lease of so many seconds. `lapse`: end a lease by the clock
    of the database."""

    join: Callable[..., Shared]
    lapse: Callable[[Shared], None]


def at_once(call: Callable[[], object]) -> object:
    """Ask the simulated database, and wait for nothing that another thread does."""
    try:
        return call()
    except Waits as waits:
        if waits.otherwise is None:
            raise
        return waits.otherwise


@pytest.fixture(params=["postgres", "simulated"])
def town(request: pytest.FixtureRequest) -> Iterator[Town]:
    opened: list[Shared] = []
    server = DatabaseServer(time.time)
    is_real = request.param == "postgres"
    url = request.getfixturevalue("url") if is_real else None
    postgres: Postgres = request.getfixturevalue("postgres") if is_real else None

    def join(lease_s: float = LEASE_S) -> Shared:
        database = SimDatabase(server, at_once) if url is None else PostgresDatabase(url)
        opened.append(database)
        database.join(f"replica-{len(opened)}:30000", lease_s)
        return database

    def lapse(database: Shared) -> None:
        me = database.replica_id
        if url is None:
            server.members[me] = server.members[me]._replace(expires_s=server.clock())
        else:
            over = f"UPDATE session_server.replicas SET expires = clock_timestamp() WHERE id = {me}"
            postgres.run(over, url)

    yield Town(join, lapse)
    for each in opened:
        each.close()


def numbered(number: int, **given: Any) -> SessionRow:
    return structs.replace(NEW, number=number, session_id=f"s{number}", **given)


def put(database: Shared, row: SessionRow = NEW, *entries: bytes) -> SessionRow:
    with database.transaction():
        database.put(row, *entries)
    found = database.numbered(row.number)
    assert found is not None
    return found


def take(database: Shared, name: str = "s1") -> SessionRow:
    found = database.take("alice", name)
    assert isinstance(found, SessionRow), found
    return found


def assert_refused(
    database: Shared, why: type[Exception], write: Callable[[], object], *, beside: int = 90
) -> None:
    """Assert that a transaction is refused, with all that it has written before."""
    with pytest.raises(why), database.transaction():  # noqa: PT012 - all or nothing
        database.put(numbered(beside))
        write()
    assert database.numbered(beside) is None


# -- leases


def test_a_replica_has_the_smallest_slot_that_is_free_and_an_id_of_its_own(town: Town) -> None:
    replicas = [town.join() for _ in range(3)]
    again = [each.join("here", LEASE_S) for each in replicas[:1]]
    assert [each.slot for each in again] == [3], "its earlier lease goes on"
    assert abs(again[0].now_s - time.time()) < SOON_S
    ids = [each.replica_id for each in replicas]
    assert ids[1] < ids[2] < ids[0]

    town.lapse(replicas[1])
    replicas[2].leave()
    joined = [replicas[0].join("here", LEASE_S), replicas[0].join("here", LEASE_S)]
    assert [each.slot for each in joined] == [0, 1] or [each.slot for each in joined] == [1, 2]
    assert ids[0] < joined[0].replica_id < joined[1].replica_id


def test_a_lease_is_renewed_by_the_clock_of_the_database_while_it_lasts(town: Town) -> None:
    replica = town.join(1.5)
    for _ in range(4):
        time.sleep(0.5)
        assert abs(replica.renew(1.5) - time.time()) < SOON_S
    other = town.join()
    put(replica)
    time.sleep(1.6)
    with pytest.raises(LeaseLost):
        replica.renew(LEASE_S)
    with pytest.raises(LeaseLost):
        replica.take("alice", "s1")
    assert_refused(replica, LeaseLost, lambda: None)
    assert take(other).epoch == 2


def test_a_replica_that_has_left_has_no_lease(town: Town) -> None:
    first, second = town.join(), town.join()
    put(first)
    put(first, numbered(2))
    first.leave()
    with pytest.raises(LeaseLost):
        first.renew(LEASE_S)
    assert [take(second, name).epoch for name in ("s1", "s2")] == [2, 2]


# -- taking and releasing


def test_a_session_is_taken_when_nobody_alive_holds_it(town: Town) -> None:
    first, second = town.join(), town.join()
    written = put(first, NEW, b"one")
    held = HeldBy(1, first.replica_id, "replica-1:30000")
    assert second.take("alice", "s1") == held
    assert take(first) == structs.replace(written, epoch=2), "its own"
    assert second.take("alice", "s1") == held
    first.release([7, 1])
    assert take(second) == structs.replace(written, epoch=3)
    first.release([1])
    assert isinstance(first.take("alice", "s1"), HeldBy), "it was not its own to release"
    assert first.take("alice", "s2") is None
    assert first.take("bob", "s1") is None


def test_whoever_takes_from_one_whose_lease_is_over_ends_it_for_good(town: Town) -> None:
    first, second = town.join(), town.join()
    put(first)
    town.lapse(first)
    assert take(second).epoch == 2
    with pytest.raises(LeaseLost):
        first.renew(LEASE_S)
    assert town.join().renew(LEASE_S) > 0
    first.join("here", LEASE_S)
    assert isinstance(first.take("alice", "s1"), HeldBy)


def test_what_was_held_before_is_not_held_by_the_same_one_that_joins_again(town: Town) -> None:
    replica = town.join()
    mine = put(replica)
    town.lapse(replica)
    replica.join("here", LEASE_S)
    assert_refused(replica, Moved, lambda: replica.append(mine, b"two"))
    assert_refused(replica, Moved, lambda: replica.put(mine, b"all"))
    assert take(replica).epoch == 2


def test_one_whose_lease_is_over_may_still_release(town: Town) -> None:
    first, second = town.join(), town.join()
    put(first)
    town.lapse(first)
    first.release([1])
    assert take(second).epoch == 2


def test_an_expired_session_is_nobodys_to_take_but_its_holder_is_named_first(town: Town) -> None:
    first, second = town.join(), town.join()
    put(first, structs.replace(NEW, expires_s=time.time() - SOON_S))
    assert isinstance(second.take("alice", "s1"), HeldBy)
    assert first.take("alice", "s1") is None
    first.release([1])
    assert second.take("alice", "s1") is None
    found = second.numbered(1)
    assert found is not None
    assert found.epoch == 1


def test_sessions_of_a_live_replica_are_not_for_others_to_expire(town: Town) -> None:
    first, second = town.join(), town.join()
    put(first, structs.replace(NEW, expires_s=5.0))
    assert second.expired((0.0, 0), 10.0, limit=5) == []
    assert [row.number for row in first.expired((0.0, 0), 10.0, limit=5)] == [1]
    town.lapse(first)
    assert [row.number for row in second.expired((0.0, 0), 10.0, limit=5)] == [1]


# -- asking


def test_who_waits_is_told_which_sessions_other_live_replicas_hold(town: Town) -> None:
    first, second, third = town.join(), town.join(), town.join()
    for number in range(1, 6):
        put(first, numbered(number))
    put(third, numbered(6))
    first.release([2, 3])
    take(second, "s3")
    with first.transaction():
        first.retire(4)
        first.delete_some(5)
    held = [second.take("alice", name) for name in ("s1", "s6")]
    assert sorted(second.holders_of(range(1, 9))) == held
    assert first.holders_of([1]) == []
    assert second.holders_of([]) == []
    town.lapse(third)
    assert second.holders_of([6, 1]) == held[:1]


def test_the_holder_hears_once_what_others_ask_for(town: Town) -> None:
    first, second = town.join(), town.join()
    for number in (1, 2):
        put(first, numbered(number))
    assert first.asked(0.05) == []
    for name in ("s2", "s1", "s2"):
        held = second.take("alice", name)
        assert isinstance(held, HeldBy)
        second.ask_for([held])
    heard: list[int] = []
    until_s = time.monotonic() + SOON_S
    while set(heard) != {1, 2} and time.monotonic() < until_s:
        heard += first.asked(0.5)
    assert set(heard) == {1, 2}
    assert second.asked(0.05) == []


def test_nobody_hears_what_is_asked_of_one_that_is_gone(town: Town) -> None:
    first, second = town.join(), town.join()
    put(first)
    held = second.take("alice", "s1")
    assert isinstance(held, HeldBy)
    first.leave()
    second.ask_for([held])
    assert second.asked(0.05) == []


# -- commits


def test_a_commit_is_refused_in_every_epoch_but_the_present_one(town: Town) -> None:
    first, second = town.join(), town.join()
    old = put(first, NEW, b"one")
    now = take(first)
    for writer, row in ((first, old), (second, now), (second, structs.replace(now, epoch=3))):
        assert_refused(writer, Moved, lambda w=writer, r=row: w.append(r, b"x"))  # type: ignore[misc]
        assert_refused(writer, Moved, lambda w=writer, r=row: w.touch(r))  # type: ignore[misc]
        assert_refused(writer, Moved, lambda w=writer, r=row: w.put(r, b"x"))  # type: ignore[misc]
    assert first.entries(1) == [b"one"]
    assert_refused(first, Behind, lambda: first.append(structs.replace(now, num_entries=5), b"x"))
    with first.transaction():
        first.append(now, b"two")
    assert second.entries(1) == [b"one", b"two"]


def test_a_commit_is_refused_of_what_was_released(town: Town) -> None:
    replica = town.join()
    mine = put(replica)
    replica.release([1])
    assert_refused(replica, Moved, lambda: replica.append(mine, b"x"))
    assert_refused(replica, Moved, lambda: replica.put(mine, b"x"))


def test_a_taken_session_that_was_deleted_is_not_written_anew(town: Town) -> None:
    replica = town.join()
    put(replica)
    mine = take(replica)
    with replica.transaction():
        replica.delete_some(1)
    assert_refused(replica, Moved, lambda: replica.put(mine, b"x"))
    assert_refused(replica, Moved, lambda: replica.append(mine, b"x"))
    assert put(replica, NEW, b"new").num_entries == 1, "its number is free again"


def test_an_open_name_is_taken_and_one_that_has_expired_is_not(town: Town) -> None:
    first, second = town.join(), town.join()
    put(first)
    another = structs.replace(numbered(2), session_id="s1")
    assert_refused(second, NameTaken, lambda: second.put(another))
    over = structs.replace(numbered(3), expires_s=5.0)
    put(first, over)
    same = structs.replace(numbered(4), session_id="s3")
    assert_refused(second, NameTaken, lambda: second.put(same))
    first.release([3])
    put(second, same)
    found = second.find("alice", "s3")
    assert found is not None
    assert found.number == 4


def test_a_name_that_was_given_on_leaves_nothing_to_whoever_had_it(town: Town) -> None:
    first, second = town.join(), town.join()
    over = put(first, structs.replace(NEW, expires_s=5.0))
    town.lapse(first)
    put(second, structs.replace(numbered(2), session_id="s1"))
    first.join("here", LEASE_S)
    assert_refused(first, Moved, lambda: first.append(over, b"x"))
    assert_refused(first, NameTaken, lambda: first.put(over, b"x"))


@pytest.mark.parametrize("deletes", ["delete_some", "retire"])
def test_nobody_deletes_what_another_live_replica_holds(town: Town, deletes: str) -> None:
    first, second = town.join(), town.join()
    for number in (1, 2):
        put(first, numbered(number), b"one")
    assert_refused(second, Moved, lambda: getattr(second, deletes)(1))
    first.release([2])
    town.lapse(first)
    for number in (1, 2):
        with second.transaction():
            getattr(second, deletes)(number)
        assert second.take("alice", f"s{number}") is None


def test_what_is_being_deleted_is_not_written_any_more(town: Town) -> None:
    replica = town.join()
    mine = put(replica, NEW, b"one")
    with replica.transaction():
        assert replica.retire(1) == 3
    assert replica.take("alice", "s1") is None
    assert_refused(replica, Moved, lambda: replica.append(mine, b"x"))
    assert_refused(replica, Moved, lambda: replica.put(mine, b"x"))


# -- records


def keep(database: Shared, *numbers: int, owner: str = "alice", kind: str = RESPONSES) -> None:
    """Write records of 10 bytes, in this order."""
    for number in numbers:
        row = RecordRow(number, kind, owner, f"r{number}", "s1", 10, number)
        with database.transaction():
            database.put_record(row, [(0, b"a")])


def kept(database: Shared) -> list[int]:
    return [row.number for row in database.records()]


def evict(database: Shared, owner: str | None, most_bytes: int) -> dict[str, int]:
    """Have records go until there is room; return the bytes that are gone, by owner."""
    found: Counter[str] = Counter()
    while gone := database.evict_records(owner, most_bytes):
        found.update(dict(gone))
    return dict(found)


def test_records_of_an_owner_that_were_written_longest_ago_go_first(town: Town) -> None:
    first, second = town.join(), town.join()
    keep(first, 3, 1, 4)
    keep(second, 2, 5)
    keep(first, 6, owner="bob")
    keep(second, 7, 8, kind=CONVERSATIONS)
    assert evict(first, "alice", 50) == {}
    assert evict(second, "alice", 30) == {"alice": 20}
    assert kept(first) == [3, 4, 5, 6, 7, 8]
    assert first.parts(1) == []
    assert evict(first, "alice", 29) == {"alice": 10}
    assert evict(first, "alice", 19) == {"alice": 20}, "a kind makes no room for another one"
    assert kept(first) == [5, 6, 8]
    keep(first, 9)
    with first.transaction():
        row = RecordRow(5, RESPONSES, "alice", "r5", "s1", 10, 10, num_writes=1)
        first.change_record(row, [], [])
    keep(first, 11)
    assert evict(second, "alice", 25) == {"alice": 10}
    assert kept(first) == [6, 8, 5, 11]
    assert sorted(first.holdings()) == [Holding("alice", 0, 30, 0), Holding("bob", 0, 10, 0)]


def test_many_go_one_after_another(town: Town) -> None:
    database = town.join()
    keep(database, *range(1, 101))
    assert evict(database, "alice", 75) == {"alice": 930}
    assert kept(database) == list(range(94, 101))


def test_one_replica_sees_to_the_records_of_all_owners(town: Town) -> None:
    first, second = town.join(), town.join()
    for number, owner in enumerate(("bob", "alice", "alice", "bob", "carol"), 1):
        keep(second, number, owner=owner)
    assert evict(second, None, 20) == {}
    assert evict(first, None, 20) == {"alice": 20, "bob": 10}
    assert kept(first) == [4, 5]
    town.lapse(first)
    assert evict(second, None, 10) == {"bob": 10}


def test_a_record_is_found_beside_another_one_of_its_session(town: Town) -> None:
    first, second = town.join(), town.join()
    assert first.record_made_in("alice", "s1", RESPONSES, beside="") is None
    keep(second, 1)
    keep(second, 2, kind=CONVERSATIONS)
    keep(second, 3, owner="bob")
    assert first.record_made_in("alice", "s1", RESPONSES, beside="r1") is None
    assert first.record_made_in("alice", "s2", RESPONSES, beside="") is None
    found = first.record_made_in("alice", "s1", RESPONSES, beside="r4")
    assert found is not None
    assert found.number == 1
