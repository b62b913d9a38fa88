"""PostgreSQL as the disk of a store: how it is opened, what breaks, and what is said of that."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest
from msgspec import structs
from psycopg import errors
from psycopg_pool import PoolTimeout

from session_server.sessions.postgres import connections, schema
from session_server.sessions.postgres import database as database_file
from session_server.sessions.postgres import reads as reads_file
from session_server.sessions.postgres.connections import MAX_READERS
from session_server.sessions.postgres.database import PostgresDatabase
from session_server.sessions.postgres.failures import explain, is_unavailable
from session_server.sessions.store import writer
from session_server.sessions.store.backend import StoreVerbs
from session_server.sessions.store.database import Behind
from session_server.sessions.store.lock import StoreUnusable
from session_server.sessions.store.ownership import Moved, NameTaken
from session_server.sessions.store.records import Holding, RecordRow
from session_server.sessions.store.writer import GroupCommits
from tests.rig.postgres import Postgres, running
from tests.sessions.test_leases import LEASE_S, NEW, SOON_S, append, assert_waits, put, take


@pytest.fixture
def database(url: str) -> Iterator[PostgresDatabase]:
    with closing(PostgresDatabase(url)) as opened:
        opened.join("here", LEASE_S)
        yield opened


def cut(postgres: Postgres, database: PostgresDatabase) -> int:
    """End all connections of a store, as its network does; return how many."""
    name = database._writer.info.dbname if not database._writer.closed else ""
    query = (
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        f" WHERE application_name = 'session-server' AND datname = '{name}'"
    )
    return len(postgres.run(query))


# -- opening


def test_replicas_that_start_at_once_make_one_store(url: str) -> None:
    barrier = threading.Barrier(8)

    def start(_number: int) -> bytes:
        barrier.wait()
        with closing(PostgresDatabase(url)) as database:
            return database.secret

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(start, range(8)))) == 1


def test_a_replica_that_starts_waits_for_another_one_that_changes_the_tables(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "ANSWER_TIMEOUT_S", 0.2)
    with psycopg.connect(url) as other, ThreadPoolExecutor(1) as threads:
        other.execute("SELECT pg_advisory_xact_lock(%s)", (schema._LOCK,))
        starting = threads.submit(PostgresDatabase, url)
        time.sleep(1.0)
        assert not starting.done()
        other.rollback()
        starting.result(SOON_S).close()


def test_an_interrupted_start_leaves_nothing(
    url: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (schema.VERSIONS[0] + "SELECT 1 / 0;",)
    with monkeypatch.context() as patched:
        patched.setattr(schema, "VERSIONS", broken)
        with pytest.raises(StoreUnusable, match="division by zero"):
            PostgresDatabase(url)
    assert postgres.run("SELECT to_regnamespace('session_server')", url) == [(None,)]
    PostgresDatabase(url).close()


def test_a_later_version_adds_to_what_is_there(
    url: str, database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, later_version = put(database, NEW, b"one"), schema.SCHEMA_VERSION + 1
    more = "ALTER TABLE sessions ADD COLUMN more int NOT NULL DEFAULT 7; CREATE TABLE another ();"
    with monkeypatch.context() as patched:
        patched.setattr(schema, "VERSIONS", (*schema.VERSIONS, more))
        patched.setattr(schema, "SCHEMA_VERSION", later_version)
        for _ in range(2):
            with closing(PostgresDatabase(url)) as later:
                assert later.secret == database.secret
                assert later.numbered(1) == written
    told = f"is of version {later_version}, and this server knows {schema.SCHEMA_VERSION}"
    with pytest.raises(StoreUnusable, match=told):
        PostgresDatabase(url)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE session_server.sessions (number int)",
        "CREATE TABLE session_server.facts (name text, value text)",
        "CREATE TABLE session_server.facts (name text, value bytea)",
        "CREATE TABLE session_server.facts (a int)",
        "CREATE VIEW session_server.facts AS SELECT 'version' AS name, '\\x61'::bytea AS value",
    ],
)
def test_tables_of_something_else_are_left_alone(
    url: str, postgres: Postgres, statement: str
) -> None:
    postgres.run("CREATE SCHEMA session_server", url)
    postgres.run(statement, url)
    with pytest.raises(StoreUnusable, match="has tables that no server made"):
        PostgresDatabase(url)
    query = "SELECT count(*) FROM pg_class WHERE relnamespace = 'session_server'::regnamespace"
    assert postgres.run(query, url) == [(1,)]


def test_an_empty_schema_is_used(url: str, postgres: Postgres) -> None:
    postgres.run("CREATE SCHEMA session_server", url)
    PostgresDatabase(url).close()


def test_a_store_without_its_secret_is_refused(
    url: str, postgres: Postgres, database: PostgresDatabase
) -> None:
    postgres.run("DELETE FROM session_server.facts WHERE name = 'secret'", url)
    with pytest.raises(StoreUnusable, match="has lost its secret"):
        PostgresDatabase(url)


def test_a_user_may_use_what_another_has_made_or_is_told_what_to_grant(
    url: str, postgres: Postgres
) -> None:
    name = url.partition("?")[0].rpartition("/")[2]
    postgres.run(f"CREATE ROLE plain_{name} LOGIN")
    plain = url.replace("postgres@", f"plain_{name}@")
    try:
        with pytest.raises(StoreUnusable, match=r"permission denied.*: GRANT CREATE ON DATABASE"):
            PostgresDatabase(plain)
        PostgresDatabase(url).close()
        with pytest.raises(StoreUnusable, match=r"permission denied.*have it own the tables"):
            PostgresDatabase(plain)
        postgres.run(f"GRANT USAGE ON SCHEMA session_server TO plain_{name}", url)
        query = f"GRANT ALL ON ALL TABLES IN SCHEMA session_server TO plain_{name}"
        postgres.run(query, url)
        query = f"GRANT ALL ON ALL SEQUENCES IN SCHEMA session_server TO plain_{name}"
        postgres.run(query, url)
        with closing(PostgresDatabase(plain)) as database:
            database.join("here", LEASE_S)
            put(database)
            postgres.run(f"REVOKE ALL ON session_server.sessions FROM plain_{name}", url)
            with pytest.raises(psycopg.Error) as failed:
                put(database, structs.replace(NEW, number=2))
            assert is_unavailable(failed.value)
            assert explain(failed.value).endswith("grant this user what it needs")
    finally:
        postgres.run(f"DROP OWNED BY plain_{name}", url)
        postgres.run(f"DROP ROLE plain_{name}")


def test_a_database_of_another_encoding_is_refused(postgres: Postgres) -> None:
    url = postgres.new_database("template0", "ENCODING", "'LATIN1'")
    with pytest.raises(StoreUnusable, match=r"texts there are LATIN1: .* --encoding UTF8"):
        PostgresDatabase(url)
    postgres.drop(url)


def test_an_old_server_and_a_standby_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(schema, "_OLDEST", 990_000)
        with pytest.raises(StoreUnusable, match=r"PostgreSQL \d+ is older than 99: upgrade it"):
            PostgresDatabase(url)
    status = psycopg.ConnectionInfo.parameter_status
    monkeypatch.setattr(
        psycopg.ConnectionInfo,
        "parameter_status",
        lambda info, name: "on" if name == "in_hot_standby" else status(info, name),
    )
    with pytest.raises(StoreUnusable, match="is a standby: have the URL name the primary"):
        PostgresDatabase(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://u:hunter2@127.0.0.1:1/x", "127.0.0.1:1/x: .*refused.*: is PostgreSQL there"),
        ("postgresql://u:hunter2@nowhere.invalid/x", "nowhere.invalid/x: .*resolve"),
        ("postgresql://u:hunter2@[::1/x", "this is no URL of PostgreSQL"),
        ("postgresql:/u:hunter2@host/x", "this is no URL of PostgreSQL"),
        ("host=127.0.0.1 port=1 password=hunter2 dbname=x", "127.0.0.1:1/x: .*refused"),
        ("host=127.0.0.1 passwd=hunter2", "this is no URL of PostgreSQL"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_without_its_password(url: str, said: str) -> None:
    with pytest.raises(StoreUnusable, match=said) as refused:
        PostgresDatabase(url)
    error: BaseException | None = refused.value
    assert "hunter2" not in str(error)
    assert "\n" not in str(error)
    while error is not None and not error.__suppress_context__:
        error = error.__cause__ or error.__context__
        assert "hunter2" not in str(error)


def test_a_database_that_is_not_there_is_named(postgres: Postgres) -> None:
    with pytest.raises(StoreUnusable, match=r'"nowhere" does not exist: make it with createdb'):
        PostgresDatabase(postgres.url("nowhere"))


# -- what the server of the database is told


@pytest.mark.parametrize(
    ("durability", "of_database", "used"),
    [
        ("turn", "on", "on"),
        ("turn", "off", "on"),
        ("turn", "local", "on"),
        ("turn", "remote_apply", "remote_apply"),
        ("relaxed", "on", "off"),
    ],
)
def test_a_commit_waits_as_long_as_its_durability_says(
    url: str, postgres: Postgres, *, durability: str, of_database: str, used: str
) -> None:
    name = url.partition("?")[0].rpartition("/")[2]
    postgres.run(f"ALTER DATABASE {name} SET synchronous_commit = {of_database}")
    with closing(PostgresDatabase(url, durability=durability)) as database:  # type: ignore[arg-type]
        query = "SELECT current_setting('synchronous_commit')"
        assert database._writer.execute(query).fetchone() == (used,)
        # An epoch or the id of a replica that were lost would be given twice.
        assert database._read(query)[0][0] in {"on", "remote_apply"}


def test_no_wait_is_without_a_bound(database: PostgresDatabase) -> None:
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    for name in names:
        query = "SELECT current_setting(%s)"
        for value in (
            database._writer.execute(query, (name,)).fetchone(),
            database._read(query, (name,))[0],
        ):
            assert value is not None
            assert value[0] != "0"
    given = database._writer.info.get_parameters()
    assert {"connect_timeout", "tcp_user_timeout", "keepalives_idle"} <= given.keys()


def test_a_database_that_forgets_is_told_of(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "session_server.store"):
        PostgresDatabase(url, durability="relaxed").close()
        assert caplog.text == ""
        PostgresDatabase(url).close()
    assert "fsync" in caplog.text


# -- connections that break


def test_idle_connections_that_broke_are_made_anew(
    postgres: Postgres, database: PostgresDatabase
) -> None:
    row = put(database)
    with ThreadPoolExecutor(MAX_READERS) as threads:
        list(threads.map(database.numbered, [1] * 50))
    assert cut(postgres, database) >= 2
    assert database.numbered(1) == row
    row = append(database, row, b"one")
    assert database.entries(1) == [b"one"]
    assert cut(postgres, database) >= 2
    database.renew(LEASE_S)
    append(database, row, b"two")


def test_a_write_whose_connection_breaks_fails_and_is_done_again_whole(
    postgres: Postgres, database: PostgresDatabase
) -> None:
    row = put(database, NEW, b"one")
    with pytest.raises(psycopg.Error) as failed, database.transaction():  # noqa: PT012
        database.append(row, b"two")
        cut(postgres, database)
        database.append(structs.replace(row, num_entries=2), b"three")
    assert is_unavailable(failed.value)
    assert database.entries(1) == [b"one"]
    put(database, row, b"one", b"two", b"three")
    assert database.entries(1) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_commit_whose_answer_is_lost_is_written_again_whole(
    postgres: Postgres,
    database: PostgresDatabase,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_committed: bool,
    is_new: bool,
) -> None:
    row = NEW if is_new else put(database, NEW, b"zero")
    record = RecordRow(1, "response", "alice", "resp_1", "s1", 10, 1)
    commits = database._commit

    def commit() -> None:
        if is_committed:
            commits()
        cut(postgres, database)
        database._writer.execute("SELECT 1")

    with monkeypatch.context() as patched:
        patched.setattr(database, "_commit", commit)
        with pytest.raises(psycopg.OperationalError), database.transaction():  # noqa: PT012
            database.put(row, b"zero", b"one")
            database.put_record(record, [(0, b"a")])
    with database.transaction():
        database.put(row, b"zero", b"one")
        database.put_record(record, [(0, b"a")])
    assert database.entries(1) == [b"zero", b"one"]
    assert database.parts(1) == [(0, b"a")]
    assert [found.num_writes for found in database.records()] == [1]
    num_bytes = len(b"zero" + b"one" + NEW.settings)
    assert database.holdings_of(["alice"]) == [Holding("alice", 1, num_bytes + 10, 0)]


@pytest.fixture
def standby_is_away(database: PostgresDatabase, postgres: Postgres) -> Iterator[None]:
    """The commits of everybody wait for a standby that does not come."""
    postgres.run("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    try:
        postgres.run("SELECT pg_reload_conf()")
        while postgres.run("SHOW synchronous_standby_names") != [("nobody",)]:
            time.sleep(0.01)
        yield
    finally:
        postgres.run("ALTER SYSTEM RESET synchronous_standby_names")
        postgres.run("SELECT pg_reload_conf()")


def await_standby(postgres: Postgres) -> int:
    """Wait until a commit waits for a standby, and return the process that does."""
    until_s = time.monotonic() + SOON_S
    query = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    while not (found := postgres.run(query)):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return int(found[0][0])


@pytest.mark.usefixtures("standby_is_away")
def test_a_commit_that_only_one_server_has_has_failed(
    database: PostgresDatabase, postgres: Postgres
) -> None:
    """PostgreSQL reports success where it gives up waiting for its standby."""
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(put, database, NEW, b"one")
        postgres.run(f"SELECT pg_cancel_backend({await_standby(postgres)})")
        error = putting.exception(SOON_S)
    assert isinstance(error, psycopg.OperationalError)
    assert "synchronous replication" in explain(error)
    assert is_unavailable(error)


@pytest.mark.usefixtures("standby_is_away")
def test_a_commit_does_not_wait_for_ever(
    database: PostgresDatabase, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_file, "COMMIT_WAIT_S", 0.5)
    with pytest.raises(psycopg.OperationalError) as failed:
        put(database, NEW, b"one")
    assert is_unavailable(failed.value)
    # Nobody knows whether it is there, and whoever writes it again waits for it.
    waiting = await_standby(postgres)
    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(put, database, NEW, b"one", b"two")
        assert_waits(putting)
        postgres.run("ALTER SYSTEM RESET synchronous_standby_names")
        postgres.run("SELECT pg_reload_conf()")
        postgres.run(f"SELECT pg_cancel_backend({waiting})")
        assert putting.exception(SOON_S) is None
    assert database.entries(1) == [b"one", b"two"]


def test_a_server_that_is_frozen_is_given_up(
    database: PostgresDatabase, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads_file, "ANSWER_WAIT_S", 0.5)
    monkeypatch.setattr(database_file, "ANSWER_WAIT_S", 0.5)
    row = put(database)
    query = f"SELECT pid FROM pg_stat_activity WHERE datname = '{database._writer.info.dbname}'"
    frozen = [pid for (pid,) in postgres.run(query)]
    try:
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(psycopg.OperationalError) as failed:
            database.numbered(1)
        assert is_unavailable(failed.value)
        append(database, row, b"one")  # it could not begin, and has begun anew
        until_s = time.monotonic() + SOON_S
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                assert database.entries(1) == [b"one"]
                break
            assert time.monotonic() < until_s
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


def test_a_database_that_is_away_fails_soon_and_is_used_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "READ_WAIT_S", 0.5)
    with running() as server:
        url = server.new_database()
        with closing(PostgresDatabase(url)) as database:
            database.join("here", 600.0)
            row = put(database, NEW, b"one")
            for how in (signal.SIGINT, signal.SIGQUIT):
                server.kill(how)
                for read in (lambda: database.numbered(1), lambda: database.renew(600.0)):
                    with pytest.raises(psycopg.Error) as failed:
                        read()
                    assert is_unavailable(failed.value)
                with pytest.raises(psycopg.Error) as failed:
                    append(database, row, b"lost")
                assert is_unavailable(failed.value)
                server.start()
                until_s = time.monotonic() + SOON_S
                while True:
                    try:
                        found = database.numbered(1)
                        break
                    except psycopg.OperationalError:
                        assert time.monotonic() < until_s
                assert found == row
                row = append(database, row, b"more")
                database.renew(600.0)
            assert database.entries(1) == [b"one", b"more", b"more"]
            assert take(database).epoch == 2


def test_a_commit_that_is_undone_for_another_one_is_tried_again(
    database: PostgresDatabase, url: str
) -> None:
    one = put(database)
    two = put(database, structs.replace(NEW, number=2, session_id="two"))
    tries, errors_told = list[int](), list[Exception | None]()

    def write(verbs: StoreVerbs) -> None:
        verbs.append(one, b"one")
        tries.append(len(tries))
        if len(tries) == 1:
            threads.submit(cross)
        verbs.append(two, b"two")

    def cross() -> None:
        other.execute("UPDATE sessions SET num_uses = num_uses WHERE number = 1")
        other.rollback()

    options = "-c search_path=session_server -c deadlock_timeout=60s"  # so that ours is undone
    with psycopg.connect(url, options=options) as other, ThreadPoolExecutor(1) as threads:
        other.execute("UPDATE sessions SET num_uses = num_uses WHERE number = 2")
        commits = GroupCommits(database, lambda run: run())
        commits.ask(write, errors_told.append)
        commits.start()
        assert commits.stop(20.0)
    assert errors_told == [None]
    assert tries == [0, 1]
    assert database.entries(1) == [b"one"]
    assert database.entries(2) == [b"two"]


def test_a_commit_that_is_always_undone_fails_in_the_end(database: PostgresDatabase) -> None:
    row, tries, errors_told = put(database), list[int](), list[Exception | None]()

    def write(_verbs: StoreVerbs) -> None:
        tries.append(len(tries))
        raise errors.SerializationFailure

    commits = GroupCommits(database, lambda run: run())
    commits.ask(write, errors_told.append)
    commits.ask(lambda verbs: verbs.append(row, b"one"), errors_told.append)
    commits.start()
    assert commits.stop(20.0)
    assert [type(error) for error in errors_told] == [errors.SerializationFailure, type(None)]
    assert len(tries) == 2 * writer.MAX_TRIES


def test_reads_beyond_the_connections_wait_for_one(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(database)
    with ThreadPoolExecutor(MAX_READERS + 1) as threads:
        for _ in range(MAX_READERS):
            threads.submit(database._read, "SELECT pg_sleep(0.5)")
        assert threads.submit(database.numbered, 1).result(SOON_S) is not None


# -- what is at fault


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (psycopg.OperationalError("server closed the connection unexpectedly"), True),
        (psycopg.InterfaceError("the connection is closed"), True),
        (PoolTimeout("couldn't get a connection after 5.00 sec"), True),
        (errors.DiskFull("disk full"), True),
        (errors.TooManyConnections("too many clients"), True),
        (errors.AdminShutdown("terminating connection"), True),
        (errors.IdleInTransactionSessionTimeout("idle"), True),
        (errors.ReadOnlySqlTransaction("read-only"), True),
        (errors.InsufficientPrivilege("denied"), True),
        (errors.UndefinedTable("gone"), True),
        (errors.LockNotAvailable("lock timeout"), True),
        (errors.DeadlockDetected("deadlock"), True),
        (errors.QueryCanceled("statement timeout"), True),
        (errors.DataCorrupted("invalid page"), True),
        (ConnectionResetError(104, "reset"), True),
        (MemoryError(), True),
        (errors.ProgramLimitExceeded("index row size 3000 exceeds"), False),
        (errors.UniqueViolation("duplicate key"), False),
        (errors.NumericValueOutOfRange("bigint out of range"), False),
        (psycopg.DataError("cannot contain NUL"), False),
        (errors.SyntaxError("syntax error"), False),
        (ValueError("x"), False),
        (Moved("x"), False),
        (NameTaken("x"), False),
        (Behind("x"), False),
    ],
)
def test_the_medium_is_told_from_what_was_written(error: Exception, *, is_so: bool) -> None:
    assert is_unavailable(error) is is_so
    assert explain(error)


def test_what_is_said_is_one_line_without_secrets() -> None:
    said = explain(
        psycopg.OperationalError(
            'connection failed: bad "postgresql://me:hunter2@db/x"\n'
            "\tpassword=hunter2 sslpassword = 'hunter2 two' host=db\n"
        )
    )
    assert "hunter2" not in said
    assert "\n" not in said
    assert "host=db" in said
    assert explain(errors.DiskFull("could not extend file")).endswith(
        ": make room on the disk of PostgreSQL"
    )


def test_values_that_cannot_be_written_are_not_the_fault_of_the_medium(
    database: PostgresDatabase,
) -> None:
    for wrong in (
        structs.replace(NEW, session_id="a\0b"),
        structs.replace(NEW, num_tokens=1 << 63),
        structs.replace(NEW, owner_id="".join(f"{n:x}" for n in range(9_000))),
    ):
        with pytest.raises(psycopg.Error) as failed:
            put(database, wrong)
        assert not is_unavailable(failed.value)
    put(database)


def test_a_record_of_the_number_or_id_of_another_is_refused(database: PostgresDatabase) -> None:
    first = RecordRow(1, "response", "alice", "resp_1", "s1", 10, 1)
    with database.transaction():
        database.put_record(first, [(0, b"a")])
    for other in (structs.replace(first, number=2), structs.replace(first, record_id="resp_2")):
        with pytest.raises(NameTaken), database.transaction():
            database.put_record(other, [(0, b"b")])
    assert database.parts(1) == [(0, b"a")]
