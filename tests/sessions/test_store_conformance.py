"""What every database of a store promises: SQLite, PostgreSQL and the simulated one alike."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from session_server.core.owner import Owner
from session_server.sessions.overview import digest_of_owner
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.store.database import Behind, Database
from session_server.sessions.store.deleted_rows import DELETED_BYTES, DELETED_ENTRIES, Freed
from session_server.sessions.store.ownership import Moved
from session_server.sessions.store.records import Holding, RecordRow, SessionRow
from session_server.sessions.store.survey import PLACES, SurveyQuestion
from tests.sim_replicas.database import SimDatabase
from tests.sim_replicas.server import DatabaseServer

AnyDatabase = Database | PostgresDatabase | SimDatabase
Open = Callable[[], AnyDatabase]

LATER_S = 4e9
FIRST_EPOCH = {Database: 0, PostgresDatabase: 1, SimDatabase: 1}
LEASE_S = 30.0


@pytest.fixture(params=["sqlite", "postgres", "simulated"])
def open_store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[], AnyDatabase]]:
    """Opens the store anew, as a server that starts does."""
    opened: list[AnyDatabase] = []
    url = request.getfixturevalue("url") if request.param == "postgres" else None
    server = DatabaseServer(time.time)

    def make() -> AnyDatabase:
        while opened:
            opened.pop().close()
        database: AnyDatabase
        if request.param == "simulated":
            database = SimDatabase(server)
            database.join("here", LEASE_S)
        elif url is None:
            database = Database(tmp_path / "store")
        else:
            database = PostgresDatabase(url)
            database.join("here", LEASE_S)
        opened.append(database)
        return database

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def database(open_store: Open) -> AnyDatabase:
    return open_store()


def row(database: AnyDatabase, number: int, **given: Any) -> SessionRow:
    name, owner = given.pop("name", f"s{number}"), given.pop("owner", "alice")
    made = SessionRow(number, owner, name, b"\x00model", LATER_S, b"\xffset", 3, 1, 2)
    return structs.replace(made, epoch=FIRST_EPOCH[type(database)], **given)


def put(database: AnyDatabase, number: int, *entries: bytes, **given: Any) -> SessionRow:
    """Write a session, and return it as it is found."""
    made = row(database, number, **given)
    with database.transaction():
        database.put(made, *entries)
    sizes = {"num_entries": len(entries), "num_bytes": sum(map(len, entries))}
    return structs.replace(made, **sizes)


# -- sessions


def test_a_session_is_read_as_it_was_written(database: AnyDatabase) -> None:
    written = put(database, 7, b"\x00one", b"", expires_s=LATER_S + 0.1, num_tokens=1 << 40)
    assert database.find("alice", "s7") == written
    assert database.numbered(7) == written
    assert database.find("bob", "s7") is None
    assert database.find("alice", "S7") is None
    assert database.numbered(8) is None
    assert database.entries(7) == [b"\x00one", b""]
    assert database.last_number() == 7
    assert database.survey(question()).found == [(0.0, written)]


def test_entries_are_written_behind_others(database: AnyDatabase) -> None:
    first = put(database, 7, b"one")
    with database.transaction():
        database.append(first, b"two", b"three")
        database.append(structs.replace(first, num_entries=3))
        database.touch(structs.replace(first, num_entries=3, expires_s=LATER_S + 9, num_turns=5))
    assert database.entries(7) == [b"one", b"two", b"three"]
    assert database.numbered(7) == structs.replace(
        first, num_entries=3, num_bytes=11, expires_s=LATER_S + 9, num_turns=5
    )


@pytest.mark.parametrize("num_entries", [0, 2])
def test_an_entry_that_does_not_follow_is_refused(database: AnyDatabase, num_entries: int) -> None:
    first = put(database, 7, b"one")
    wrong = structs.replace(first, num_entries=num_entries)
    for write in (lambda: database.append(wrong, b"two"), lambda: database.touch(wrong)):
        with pytest.raises(Behind), database.transaction():  # noqa: PT012
            database.touch(structs.replace(first, num_tokens=99))
            write()
    assert database.numbered(7) == first
    assert database.entries(7) == [b"one"]


def test_a_session_that_is_gone_is_not_written_behind(database: AnyDatabase) -> None:
    gone = row(database, 7, num_entries=1)
    with pytest.raises((Behind, Moved)), database.transaction():
        database.append(gone, b"two")
    with pytest.raises((Behind, Moved)), database.transaction():
        database.touch(gone)
    assert database.numbered(7) is None


def test_a_session_is_written_in_place_of_what_was_there(database: AnyDatabase) -> None:
    put(database, 7, b"one", b"two", b"three")
    again = put(database, 7, b"all", num_tokens=9, model=b"other")
    assert database.numbered(7) == again
    assert database.entries(7) == [b"all"]


@pytest.mark.parametrize("expires_s", [0.5, 5.0])
def test_an_expired_session_gives_its_name_to_the_next(
    database: AnyDatabase, expires_s: float
) -> None:
    put(database, 1, b"old", name="same", expires_s=expires_s)
    new = put(database, 2, b"new", name="same")
    assert database.find("alice", "same") == new
    old = database.numbered(1)
    assert old is not None
    assert (old.session_id, old.name, old.expires_s) == ("same/1", "same", min(expires_s, 1.0))
    assert database.entries(1) == [b"old"]


def test_a_transaction_is_all_or_nothing(database: AnyDatabase) -> None:
    first = put(database, 1, b"one")
    with pytest.raises(KeyError), database.transaction():  # noqa: PT012
        database.put(row(database, 2), b"x")
        database.append(first, b"two")
        database.delete_some(1)
        database.put_record(record(1), [(0, b"p")])
        raise KeyError
    assert database.numbered(1) == first
    assert database.numbered(2) is None
    assert database.entries(1) == [b"one"]
    assert database.records() == []
    put(database, 2)  # and the next one is as any other


def test_a_wrong_value_fails_its_transaction_alone(database: AnyDatabase) -> None:
    with pytest.raises(Exception, match=r".+"), database.transaction():
        database.put(row(database, 1, num_tokens=1 << 70))
    put(database, 1)


def test_a_commit_under_way_is_not_read(database: AnyDatabase) -> None:
    first = put(database, 1, b"one")
    with database.transaction():
        database.append(first, b"two")
        database.put(row(database, 2))
        assert database.entries(1) == [b"one"]
        assert database.numbered(1) == first
        assert database.last_number() == 1
    assert database.entries(1) == [b"one", b"two"]
    assert database.last_number() == 2


def test_a_store_is_there_when_it_is_opened_anew(open_store: Open) -> None:
    first = open_store()
    secret = first.secret
    written = put(first, 1, b"one")
    for _ in range(2):
        again = open_store()
        assert again.secret == secret
        assert len(secret) == 32
        assert again.numbered(1) == written
        assert again.entries(1) == [b"one"]


# -- slices of what is long


@pytest.fixture
def long(database: AnyDatabase) -> AnyDatabase:
    put(database, 1, b"aaaa", b"bbbb", b"", b"cc", b"d")
    return database


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        ({}, [b"aaaa", b"bbbb", b"", b"cc", b"d"]),
        ({"limit": 2}, [b"aaaa", b"bbbb"]),
        ({"limit": 0}, []),
        ({"start": 3}, [b"cc", b"d"]),
        ({"start": 5}, []),
        ({"max_bytes": 0}, [b"aaaa"]),
        ({"max_bytes": 4}, [b"aaaa"]),
        ({"max_bytes": 5}, [b"aaaa", b"bbbb"]),
        ({"max_bytes": 9}, [b"aaaa", b"bbbb", b"", b"cc"]),
        ({"start": 2, "max_bytes": 0}, [b""]),
        ({"start": 1, "limit": 3, "max_bytes": 100}, [b"bbbb", b"", b"cc"]),
    ],
)
def test_entries_are_read_in_slices(
    long: AnyDatabase, bounds: dict[str, int], found: list[bytes]
) -> None:
    assert long.entries(1, **bounds) == found


def test_parts_are_read_in_slices(database: AnyDatabase) -> None:
    with database.transaction():
        database.put_record(record(1), [(3, b"c"), (1, b"aa"), (9, b"i")])
    assert database.parts(1) == [(1, b"aa"), (3, b"c"), (9, b"i")]
    assert database.parts(1, after=1) == [(3, b"c"), (9, b"i")]
    assert database.parts(1, limit=1) == [(1, b"aa")]
    assert database.parts(1, max_bytes=3) == [(1, b"aa"), (3, b"c")]
    assert database.parts(2) == []


# -- deletion


def test_a_short_session_is_deleted_at_once(database: AnyDatabase) -> None:
    put(database, 1, b"one")
    with database.transaction():
        assert database.delete_some(1) == Freed("alice", 3 + 4, 0, is_gone=True)
        assert database.delete_some(1) is None
    assert database.numbered(1) is None
    assert database.entries(1) == []


@pytest.mark.parametrize(
    ("num_entries", "size", "num_writes"),
    [
        (DELETED_ENTRIES, 1, 1),
        (DELETED_ENTRIES + 1, 1, 2),
        (5, DELETED_BYTES // 2, 3),
        (2, DELETED_BYTES + 1, 2),
    ],
)
def test_a_long_session_is_deleted_in_parts(
    database: AnyDatabase, num_entries: int, size: int, num_writes: int
) -> None:
    first = put(database, 1, *[bytes(size)] * num_entries)
    freed: list[Freed | None] = []
    while not freed or not (freed[-1] and freed[-1].is_gone):
        with database.transaction():
            freed.append(database.delete_some(1))
        if not (freed[-1] and freed[-1].is_gone):
            left = database.numbered(1)
            assert left is not None
            assert (left.session_id, left.expires_s) == ("s1/1", -1)
            assert not left.is_whole
            assert left.num_entries == len(database.entries(1))
            assert left.num_bytes == size * left.num_entries
            assert database.find("alice", "s1") is None
    assert len(freed) == num_writes
    assert sum(each.num_bytes for each in freed if each) == first.num_bytes + len(first.settings)


def test_a_retired_session_keeps_its_tokens_and_not_its_name(database: AnyDatabase) -> None:
    put(database, 1, b"one", name="same")
    put(database, 3, b"three")
    with database.transaction():
        assert database.retire(1) == 3
        assert database.retire(2) == 0
    found = database.numbered(1)
    assert found is not None
    assert (found.session_id, found.is_retired, found.is_whole) == ("same/1", True, True)
    assert database.entries(1) == [b"one"]
    assert database.holdings() == [Holding("alice", 1, 3 + 4 + 5 + 4, 3)]
    assert database.census(1.0) == (1, 0)
    put(database, 4, name="same")
    with database.transaction():
        assert database.delete_some(1) == Freed("alice", 7, 3, is_gone=True)


# -- lists


def test_lists_are_of_an_owner_and_of_a_time(database: AnyDatabase) -> None:
    for number in range(1, 9):
        put(
            database,
            number,
            bytes(number),
            owner="alice" if number % 2 else "Bob",
            expires_s=float(number * 100),
        )
    page = database.page("alice", after=1, now_s=500.0, limit=9)
    assert [found.number for found in page] == [5, 7]
    assert [found.number for found in database.page("alice", after=0, now_s=1.0, limit=2)] == [1, 3]
    assert sorted(database.holdings()) == [
        Holding("Bob", 4, 20 + 16, 0),
        Holding("alice", 4, 16 + 16, 0),
    ]
    assert database.census(401.0) == (4, 4)
    first, second = database.expired((-1e9, 0), 500.0, limit=2)
    assert (first.number, second.number) == (1, 2)
    rest = database.expired((second.expires_s, second.number), 500.0, limit=9)
    assert [found.number for found in rest] == [3, 4]
    assert database.num_expiring(200.0, 500.0, limit=9) == 3
    assert database.num_expiring(200.0, 500.0, limit=2) == 2


def test_an_empty_store_has_nothing(database: AnyDatabase) -> None:
    assert database.last_number() == 0
    assert database.holdings() == []
    assert database.census(1.0) == (0, 0)
    assert database.records() == []
    assert database.noted_s() is None
    assert database.survey(question()) == ([], 0)


def test_the_time_may_be_noted(database: AnyDatabase) -> None:
    with database.transaction():
        database.note_time(1_700_000_000.0)
    assert database.noted_s() in {1_700_000_000.0, None}


def question(**given: Any) -> SurveyQuestion:
    asked: dict[str, Any] = {
        "sort": "opened",
        "after": None,
        "limit": 20,
        "text": "",
        "digest": lambda owner_id: digest_of_owner(Owner(owner_id)),
        "without": frozenset(),
    }
    return SurveyQuestion(**asked | given)


@pytest.mark.parametrize("sort", sorted(PLACES))
@pytest.mark.parametrize("text", ["", "name-4", "ol", "nobody", digest_of_owner(Owner("bob"))[:9]])
def test_a_look_through_all_finds_each_once(database: AnyDatabase, sort: str, text: str) -> None:
    with database.transaction():
        for number in range(1, 60):
            made = row(
                database,
                number,
                name=f"name-{number}",
                owner=("alice", "bob")[number % 2],
                expires_s=5.0 if number > 50 else 10.0 + number % 7,
                num_tokens=number % 5,
                num_turns=number % 4,
            )
            database.put(made)
    matching = {
        "": range(1, 51),
        "ol": range(1, 51),
        "name-4": [4, *range(40, 50)],
        "nobody": [],
    }
    expected = set(matching.get(text, range(1, 51, 2))) - {1, 2, 44}
    found: list[tuple[float, int]] = []
    without = frozenset({1, 2, 44, 55})
    while True:
        after = found[-1] if found else None
        answer = database.survey(
            question(sort=sort, after=after, limit=7, text=text, without=without, now_s=10.0)
        )
        assert answer.num_matching == len(expected)
        found += [(place, each.number) for place, each in answer.found]
        if len(answer.found) < 7:
            break
    assert found == sorted(found)
    assert Counter(number for _, number in found) == Counter(expected)


# -- records


def record(number: int, **given: Any) -> RecordRow:
    made = RecordRow(number, "response", "alice", f"resp_{number}", "s1", 10, number)
    return structs.replace(made, **given)


def test_a_record_is_read_as_it_was_written(database: AnyDatabase) -> None:
    with database.transaction():
        database.put_record(record(1, used=5), [(0, b"a"), (2, b"\x00")])
        database.put_record(record(2, used=3, owner_id="bob"), [])
    assert database.records() == [
        record(2, used=3, owner_id="bob", num_writes=1),
        record(1, used=5, num_writes=1),
    ]
    assert database.parts(1) == [(0, b"a"), (2, b"\x00")]
    assert database.find_record("alice", "resp_1") == record(1, used=5, num_writes=1)
    assert database.find_record("bob", "resp_1") is None


def test_a_record_is_changed_in_parts(database: AnyDatabase) -> None:
    with database.transaction():
        database.put_record(record(1), [(0, b"a"), (1, b"b"), (2, b"c")])
        database.change_record(
            record(1, num_bytes=20, used=9, num_writes=1), [(1, b"B"), (5, b"e")], [0, 7]
        )
    assert database.parts(1) == [(1, b"B"), (2, b"c"), (5, b"e")]
    assert database.records() == [record(1, num_bytes=20, used=9, num_writes=2)]
    another = record(1, num_writes=2, used_last=8)
    for behind in (record(1, num_writes=1), record(2, num_writes=1), another):
        with pytest.raises(Behind), database.transaction():
            database.change_record(behind, [(1, b"x")], [2])
    assert database.parts(1) == [(1, b"B"), (2, b"c"), (5, b"e")]
    with database.transaction():
        database.change_record(record(1, num_writes=2, used_last=9), [], [5])
    assert database.parts(1) == [(1, b"B"), (2, b"c")]


def test_a_record_is_written_again_and_deleted(database: AnyDatabase) -> None:
    with database.transaction():
        database.put_record(record(1), [(0, b"a"), (1, b"b")])
        database.put_record(record(1, num_writes=1), [(4, b"all")])
    assert database.parts(1) == [(4, b"all")]
    assert database.records() == [record(1, num_writes=2)]
    with database.transaction():
        database.delete_record(1)
        database.delete_record(1)
    assert database.records() == []
    assert database.parts(1) == []


def test_of_two_parts_at_one_place_the_last_is_there(database: AnyDatabase) -> None:
    with database.transaction():
        database.put_record(record(1), [(0, b"a"), (0, b"b")])
    assert database.parts(1) == [(0, b"b")]


# -- several threads


def test_what_is_read_while_commits_go_on_is_whole(database: AnyDatabase) -> None:
    """A row and its entries may be of two commits: never fewer entries than an earlier row says."""
    first = put(database, 1, b"0")
    is_over = threading.Event()

    def write() -> None:
        with contextlib.ExitStack() as at_end:
            at_end.callback(is_over.set)
            for number in range(1, 100):
                with database.transaction():
                    database.append(structs.replace(first, num_entries=number), b"%d" % number)

    def read() -> int:
        num_read = 0
        while not (num_read and is_over.is_set()):
            found = database.numbered(1)
            assert found is not None
            entries = database.entries(1)
            assert len(entries) >= found.num_entries
            assert entries == [b"%d" % number for number in range(len(entries))]
            num_read += 1
        return num_read

    with ThreadPoolExecutor(2) as threads:
        writing, reading = threads.submit(write), threads.submit(read)
        writing.result(60)
        assert reading.result(60) > 0
    assert len(database.entries(1)) == 100
