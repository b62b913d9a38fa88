"""What owners have in a shared store, and that no statement looks at all sessions for it."""

from __future__ import annotations

from contextlib import closing
from typing import Final

import psycopg
import pytest
from msgspec import structs

from session_server.sessions.postgres import holdings, leases
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.store.records import Holding, RecordRow
from tests.rig.postgres import Postgres
from tests.sessions.test_leases import LEASE_S, NEW, put
from tests.sessions.test_postgres_store import database

__all__ = ["database"]

RECORD = RecordRow(1, "response", "alice", "resp_1", "", 100, 1)


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
        database.records_made_in("o1", "s1")
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
