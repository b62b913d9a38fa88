"""What owners have in a shared store, and that no statement looks at all sessions for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final

import psycopg
import pytest
from msgspec import structs

from session_server.sessions.postgres import holdings, leases
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.store.records import CONVERSATIONS, RESPONSES, Holding, RecordRow
from tests.rig.postgres import Postgres
from tests.sessions.test_leases import LEASE_S, NEW, put
from tests.sessions.test_postgres_store import database

__all__ = ["database"]

RECORD = RecordRow(1, RESPONSES, "alice", "resp_1", "", 100, 1)


def counted(database: PostgresDatabase) -> list[Holding]:
    return sorted(database.holdings_of(["alice", "bob"]))


def test_what_owners_have_is_known_without_a_look_at_it(
    url: str, database: PostgresDatabase
) -> None:
    put(database, NEW, b"one")
    put(database, structs.replace(NEW, number=2, owner_id="bob"), b"three")
    with database.transaction():
        database.put_record(RECORD, [(0, b"a")])
        database.change_record(structs.replace(RECORD, num_bytes=70, num_writes=1), [], [])
    num_row_bytes = len(NEW.settings)
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE session_server.sessions, session_server.records")
        assert counted(database) == [
            Holding("alice", 1, 3 + num_row_bytes + 70, 0),
            Holding("bob", 1, 5 + num_row_bytes, 0),
        ]
    with database.transaction():
        database.retire(2)
        database.delete_record(1)
    assert counted(database) == [
        Holding("alice", 1, 3 + num_row_bytes, 0),
        Holding("bob", 0, 5 + num_row_bytes, 5),
    ]


def test_who_has_nothing_any_more_takes_no_room(
    url: str, postgres: Postgres, database: PostgresDatabase
) -> None:
    put(database, NEW, b"one")
    put(database, structs.replace(NEW, number=2, owner_id="bob"), b"one")
    database.release([1])
    query = "SELECT owner, slot, num_sessions FROM session_server.holdings ORDER BY 1, 2"
    with closing(PostgresDatabase(url)) as other:
        assert postgres.run(query, url) == [("alice", -1, 1), ("bob", -1, 1)]
        other.join("there", LEASE_S)
        with other.transaction():
            other.delete_some(1)
        assert postgres.run(query, url) == [("alice", -1, 1), ("alice", 1, -1), ("bob", -1, 1)]
        assert [held.owner_id for held in other.holdings()] == ["bob"]
    with closing(PostgresDatabase(url)):
        assert postgres.run(query, url) == [("bob", -1, 1)]
    put(database, structs.replace(NEW, number=3, session_id="c"), b"one")
    with database.transaction():
        database.delete_some(3)
    assert postgres.run(query, url) == [("bob", -1, 1)]


def test_what_a_server_of_an_earlier_version_has_not_counted_is_counted_at_a_start(
    url: str, postgres: Postgres, database: PostgresDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    put(database, NEW, b"one")
    before = counted(database)
    postgres.run("DROP TABLE session_server.holdings", url)
    postgres.run("DROP INDEX session_server.sessions_of_holder", url)
    index = "INDEX sessions_of_holder ON session_server.sessions (holder)"
    postgres.run(f"CREATE {index}", url)
    postgres.run("UPDATE session_server.facts SET value = '1' WHERE name = 'version'", url)
    with closing(PostgresDatabase(url)) as later:
        assert counted(later) == before
        assert "not counted right" not in caplog.text
    postgres.run("UPDATE session_server.sessions SET num_bytes = num_bytes + 9", url)
    # One that commits meanwhile waits for nobody, and is counted once.
    row = structs.replace(NEW, number=2, session_id="two")
    with database.transaction():
        database.put(row, b"three")
        with closing(PostgresDatabase(url)) as later:
            assert [held.num_bytes for held in counted(later)] == [before[0].num_bytes + 9]
    assert "what 1 owners have was not counted right" in caplog.text
    num_bytes = before[0].num_bytes + 9 + 5 + len(NEW.settings)
    assert counted(database) == database.holdings() == [Holding("alice", 2, num_bytes, 0)]


TO_VERSION_3: Final = """
ALTER TABLE session_server.holdings DROP COLUMN num_conversation_bytes;
DROP INDEX session_server.records_by_use;
DROP INDEX session_server.records_of_owner_by_use;
UPDATE session_server.facts SET value = '3' WHERE name = 'version';
"""


def test_a_store_that_does_not_count_conversations_apart_does_once_it_is_opened(
    url: str, postgres: Postgres, database: PostgresDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    with database.transaction():
        database.put_record(RECORD, [])
        for number in (2, 3, 4):
            told = structs.replace(RECORD, number=number, record_id=f"c{number}", used=number)
            database.put_record(structs.replace(told, kind=CONVERSATIONS), [])
    before = counted(database)
    for statement in TO_VERSION_3.strip().split("\n"):
        postgres.run(statement, url)
    with closing(PostgresDatabase(url)) as later:
        assert "not counted right" not in caplog.text
        assert counted(later) == later.holdings() == before
        # A server of the earlier version goes on beside it.
        postgres.run(
            "INSERT INTO session_server.holdings SELECT 'alice', 5, 0, 0, 0, 0 ON CONFLICT"
            " (owner, slot) DO UPDATE SET num_bytes = holdings.num_bytes + EXCLUDED.num_bytes",
            url,
        )
        assert later.evict_records("alice", 250) == [("alice", 100)]
        assert [row.number for row in later.records()] == [1, 3, 4]


@pytest.mark.parametrize("written_as", [1, 9], ids=["only looked at", "written again"])
def test_a_record_that_is_written_again_while_it_is_to_go_stays(
    url: str, database: PostgresDatabase, written_as: int
) -> None:
    with database.transaction():
        database.put_record(RECORD, [])
        database.put_record(structs.replace(RECORD, number=2, record_id="resp_2", used=2), [])
    with ThreadPoolExecutor(1) as threads, psycopg.connect(url) as other:
        change = "UPDATE session_server.records SET used = %s WHERE number = 1"
        other.execute(change, (written_as,))
        going = threads.submit(database.evict_records, "alice", 100)
        wait_until(other, "SELECT count(*) FROM pg_locks WHERE NOT granted")
        other.commit()
        gone = going.result()
    assert gone == ([("alice", 100)] if written_as == 1 else [])
    assert len(database.records()) == 2 - len(gone)
    assert holdings.set_right(database._writer) == 0, "it is counted"


def wait_until(connection: psycopg.Connection[tuple[int]], query: str) -> None:
    """Ask again and again until something is found. Raises TimeoutError."""
    for _ in range(1000):
        if connection.execute(query).fetchone() != (0,):
            return
        connection.execute("SELECT pg_sleep(0.01)")
    raise TimeoutError(query)


def test_replicas_that_make_room_at_once_delete_no_more_than_one_of_them(
    url: str, database: PostgresDatabase
) -> None:
    rows = [structs.replace(RECORD, number=n, record_id=f"r{n}", used=n) for n in range(1, 200)]
    with database.transaction():
        for row in rows:
            database.put_record(row, [(0, b"a")])
    with closing(PostgresDatabase(url)) as other, ThreadPoolExecutor(4) as threads:
        other.join("there", LEASE_S)

        def evict_all(replica: PostgresDatabase) -> int:
            num_bytes = 0
            while gone := replica.evict_records("alice", 1000):
                num_bytes += gone[0][1]
            return num_bytes

        gone = list(threads.map(evict_all, [database, other, database, other]))
    assert sum(gone) == 18_900
    assert [row.number for row in database.records()] == list(range(190, 200))
    assert holdings.set_right(database._writer) == 0, "it is counted"


def test_a_replica_that_only_prefills_has_no_records_go(
    url: str, database: PostgresDatabase
) -> None:
    with database.transaction():
        database.put_record(RECORD, [])
    database.leave()
    database.join("here", LEASE_S, role="prefill")
    with closing(PostgresDatabase(url)) as other:
        other.join("there", LEASE_S)
        assert database.evict_records(None, 50) == []
        assert other.evict_records(None, 50) == [("alice", 100)]


MANY: Final = 20_000


def test_no_statement_that_is_asked_again_and_again_looks_at_all_sessions(
    url: str, database: PostgresDatabase
) -> None:
    asked: list[tuple[str, object]] = []
    read = database._read

    def noting(query: str, values: object = ()) -> list[tuple[object, ...]]:
        asked.append((query, values))
        return read(query, values)  # type: ignore[arg-type]

    options = "-c search_path=session_server"
    with psycopg.connect(url, autocommit=True, options=options) as other:
        other.execute(
            "INSERT INTO sessions SELECT n, 'o' || n % 1000, 's' || n, 'm', 4e9 + n, 's', 1, 1, 1,"
            f" 0, 10, CASE WHEN n % 3 = 0 THEN 1 END, 1 FROM generate_series(1, {MANY}) AS n"
        )
        other.execute(
            "INSERT INTO records SELECT n, 'responses', 'o' || n % 1000, 'r' || n, '', 10, n, 1"
            f" FROM generate_series(1, {MANY}) AS n"
        )
        holdings.set_right(other)  # type: ignore[arg-type]
        other.execute("ANALYZE")
        database._read = noting  # type: ignore[method-assign]
        database.find("o1", "s1")
        database.numbered(1)
        database.page("o1", after=0, now_s=1.0, limit=20)
        database.expired((0.0, 0), 1.0, limit=128)
        database.num_expiring(0.0, 1.0, limit=9)
        database.find_record("o1", "r1")
        database.record_made_in("o1", "s1", RESPONSES, beside="r1")
        database.last_number()
        assert [held.num_sessions for held in database.holdings_of(["o1", "o2"])] == [20, 20]
        database.release([1])
        database.leave()
        assert len(asked) > MANY // 3 // leases.RELEASED_AT_ONCE
        for query, values in asked:
            explained = psycopg.ClientCursor(other).execute(f"EXPLAIN {query}", values)  # type: ignore[arg-type]
            plan = "\n".join(line for (line,) in explained.fetchall())
            assert "(SubPlan" not in plan, f"asked anew for each row that is passed over: {plan}"
            for table in ("sessions", "records", "holdings"):
                assert f"Seq Scan on {table}" not in plan, plan
                assert f"{table}_pkey" not in plan or "Filter" not in plan, plan


def test_records_go_without_a_look_at_those_that_stay(
    url: str, postgres: Postgres, database: PostgresDatabase
) -> None:
    options = "-c search_path=session_server"
    with psycopg.connect(url, autocommit=True, options=options) as other:
        other.execute(
            "INSERT INTO records SELECT n, 'responses', 'o' || n % 2, 'r' || n, '', 10, n, 1"
            f" FROM generate_series(1, {MANY}) AS n"
        )
        holdings.set_right(other)  # type: ignore[arg-type]
        other.execute("ANALYZE")
        values = {"owner": "o1", "most": MANY, "limit": holdings.EVICTED_AT_ONCE, "slot": 0}
        values["me"] = database.replica_id
        for query, index in (
            (holdings.EVICT_OF_OWNER, "records_of_owner_by_use"),
            (holdings.EVICT_OF_ALL, "records_by_use"),
        ):
            explained = psycopg.ClientCursor(other).execute(f"EXPLAIN {query}", values)
            plan = "\n".join(line for (line,) in explained.fetchall())
            assert f"Index Scan using {index} on records" in plan, plan
            assert "Seq Scan on records" not in plan, plan
