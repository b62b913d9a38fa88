"""The store itself: its files, its lock, its versions, and commits of many writes at once."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import math
import os
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest

from session_server.sessions.history_change import AnswersChange, HistoryChange, ItemsChange
from session_server.sessions.store import patience, session_store, writer
from session_server.sessions.store.database import Behind, Database
from session_server.sessions.store.lock import StoreIsBusy, StoreIsServed, StoreUnusable
from session_server.sessions.store.records import (
    Damaged,
    EndRecord,
    LogEntry,
    SessionRow,
    StoredSettings,
    decode_entry,
    decode_settings,
    encode_entry,
    encode_settings,
)
from session_server.sessions.store.session_store import SessionStore
from tests.sessions.paper_store import count
from tests.sessions.world import OWNER

SETTINGS = encode_settings(StoredSettings(900.0, {"k": "v"}, False, 1.0, b"digest", None, 1.0))
ENTRY = LogEntry(
    HistoryChange(
        0, b"\x01\0\0\0", ItemsChange(0, (), 1), AnswersChange(0, (), ()), ("t",), 1, False, 0
    ),
    (EndRecord((1 << 64) - 1, b"digest", "failed", "code", 1, 0, 5, 4, 3, 2, 1, -1.0),),
)
DATA = encode_entry(ENTRY)


def row(number: int, *, name: str | None = None, num_entries: int = 0, **kept: float) -> SessionRow:
    return SessionRow(
        number,
        OWNER.owner_id,
        name or f"s{number}",
        b"model",
        kept.get("expires_s", 100.0),
        SETTINGS,
        3,
        1,
        2,
        num_entries,
    )


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "store")
    yield opened
    opened.close()


def test_a_session_and_its_entries_are_read_as_they_were_written(database: Database) -> None:
    with database.transaction():
        database.put(row(7), DATA)
        database.append(row(7, num_entries=1), DATA + b"")
        database.touch(row(7, num_entries=2, expires_s=5.0))
    found = database.find(OWNER.owner_id, "s7")
    num_bytes = 2 * len(DATA)
    assert found == msgspec.structs.replace(
        row(7, num_entries=2, expires_s=5.0), num_bytes=num_bytes
    )
    assert [decode_entry(data) for data in database.entries(7)] == [ENTRY, ENTRY]
    assert count(database) == (1, 7)
    assert database.find("stranger", "s7") is None


def test_an_entry_follows_the_last_one_or_is_refused_with_all_of_its_transaction(
    database: Database,
) -> None:
    with database.transaction():
        database.put(row(1), DATA)

    def write(num_entries: int) -> None:
        with database.transaction():
            database.put(row(2), DATA)
            database.append(row(1, num_entries=num_entries), DATA)

    for num_entries in (0, 2):
        with pytest.raises(Behind):
            write(num_entries)
    with pytest.raises(Behind), database.transaction():
        database.touch(row(3))
    assert count(database) == (1, 1)
    assert len(database.entries(1)) == 1


def test_a_session_written_again_replaces_what_had_its_number_and_ends_what_had_its_name(
    database: Database,
) -> None:
    with database.transaction():
        for number in (1, 2):
            database.put(row(number), DATA)
            database.append(row(number, num_entries=1), DATA)
        database.put(row(1, name="s2"), DATA)
    assert [len(database.entries(number)) for number in (1, 2)] == [1, 2]
    found = database.find(OWNER.owner_id, "s2")
    assert found is not None
    assert found.number == 1
    (ended,) = database.expired((0.0, 0), 2.0, limit=9)
    assert (ended.number, ended.name, ended.is_retired) == (2, "s2", False)


def test_a_retired_session_has_its_tokens_and_frees_its_id(database: Database) -> None:
    with database.transaction():
        database.put(row(1, name="s"), DATA)
        database.retire(1)
    assert database.find(OWNER.owner_id, "s") is None
    assert database.holdings() == [(OWNER.owner_id, 0, len(DATA) + len(row(1).settings), len(DATA))]
    assert not list(database.walk(None))
    with database.transaction():
        database.put(row(2, name="s"), DATA)
    (retired,) = database.expired((-math.inf, 0), 0.5, limit=9)
    assert (retired.number, retired.name, retired.is_retired) == (1, "s", True)
    assert database.entries(1) == [DATA]


def test_pages_and_what_has_expired_come_in_order_and_no_more_than_asked_for(
    database: Database,
) -> None:
    with database.transaction():
        for number in (5, 3, 9, 7):
            database.put(row(number, expires_s=float(number)), DATA)
        database.delete(7)
    assert [each.number for each in database.page(OWNER.owner_id, after=3, now_s=0.0, limit=1)] == [
        5
    ]
    assert [each.number for each in database.page(OWNER.owner_id, after=0, now_s=5.0, limit=9)] == [
        5,
        9,
    ]
    assert [each.number for each in database.expired((0.0, 0), 9.0, limit=9)] == [3, 5]
    assert [each.number for each in database.expired((0.0, 0), 9.0, limit=1)] == [3]
    assert [each.number for each in database.expired((3.0, 3), 9.5, limit=9)] == [5, 9]
    assert database.page("stranger", after=0, now_s=0.0, limit=9) == []


def test_only_the_user_may_read_a_store(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        database = Database(tmp_path / "store")
        with database.transaction():
            database.put(row(1), DATA)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    for file in (tmp_path / "store").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file.name
    database.close()


def test_a_store_has_one_server(tmp_path: Path) -> None:
    database = Database(tmp_path / "store")
    database.lock.serve()
    program = (
        "import sys; from pathlib import Path;"
        "from session_server.sessions.store.database import Database;"
        "Database(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "another server has it open" in second.stderr
    database.close()
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("num_bytes", [100, 4096])
def test_rubbish_in_a_new_file_that_is_undone_leaves_nothing(
    tmp_path: Path, num_bytes: int
) -> None:
    """SQLite reads what kind of database it is before it undoes what a crash has left."""
    header = b"SQLite format 3\0" + struct.pack(">H", 4096) + bytes([1, 1, 0, 64, 32, 32])
    rubbish = header.ljust(64, b"\0") + b"\0\0\0\7"  # "vacuum a little at a time"
    (tmp_path / MAIN).write_bytes(rubbish.ljust(num_bytes, b"\0"))
    journal = bytes.fromhex("d9d505f920a163d7") + struct.pack(">5I", 0, 1, 0, 512, 4096)
    (tmp_path / f"{MAIN}-journal").write_bytes(journal.ljust(512, b"\0"))
    with closing(Database(tmp_path)) as database:
        assert database.faults(1) == []


def test_a_server_waits_for_no_program_that_has_locked_the_directory(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    with pytest.raises(StoreIsBusy, match="another program has locked this directory"):
        SessionStore.in_directory(tmp_path, model=b"model")
    os.close(fd)
    SessionStore.in_directory(tmp_path, model=b"model")._database.close()


@pytest.mark.parametrize("name", ["lock", "sessions.sqlite3"])
def test_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnusable, match="--store"):
        Database(tmp_path / "store")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("is_read_only", [False, True])
@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("sessions.sqlite3", "directory", "is a directory, and must be a file"),
        ("sessions.sqlite3-wal", "pipe", "is a device or a pipe, and must be a file"),
        ("lock", "pipe", "is a device or a pipe, and must be a file"),
        ("kv", "link", "is a link, and must be a directory"),
        ("kv", "file", "is a file, and must be a directory"),
        ("kv/refused", "link", "is a link, and must be a directory"),
        ("kv/refused", "file", "is a file, and must be a directory"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, *, name: str, kind: str, told: str, is_read_only: bool
) -> None:
    Database(tmp_path).close()
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(tmp_path.parent, target_is_directory=True)
        case _:
            path.touch()
    with pytest.raises(StoreUnusable, match=f"{name} {told}"):
        Database(tmp_path, is_read_only=is_read_only)


def test_files_that_others_could_open_are_their_owners_alone_when_a_server_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, shared = tmp_path / "store", tmp_path / "shared"
    for directory in (store, shared):
        Database(directory).close()
        (directory / "kv").mkdir(mode=0o755)
        directory.chmod(0o755)
        (directory / "sessions.sqlite3").chmod(0o644)
    (shared / "something else").touch(mode=0o644)
    for directory in (store, shared):
        Database(directory).close()
        for file in (*directory.glob("sessions*"), directory / "lock", directory / "kv"):
            assert not file.stat().st_mode & 0o077, file
    assert store.stat().st_mode & 0o777 == 0o700
    assert shared.stat().st_mode & 0o777 == 0o755
    assert (shared / "something else").stat().st_mode & 0o777 == 0o644
    assert f"other users could open {store / 'sessions.sqlite3'}" in caplog.text


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_file_that_may_not_be_read_is_told_of_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_read_only: bool
) -> None:
    """As of a backup that another user has put there, which SQLite takes for a disk that fails."""
    Database(tmp_path).close()
    path = tmp_path / "sessions.sqlite3"

    def may(asked: Path, mode: int, *, effective_ids: bool) -> bool:
        return not (asked == path and mode == os.R_OK and effective_ids)

    monkeypatch.setattr(os, "access", may)
    with pytest.raises(StoreUnusable, match=f"{path}: permission denied for user"):
        Database(tmp_path, is_read_only=is_read_only)


def test_a_store_of_a_later_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / "sessions.sqlite3") as other:
        other.execute("PRAGMA user_version = 99")
    other.close()
    before = (tmp_path / "sessions.sqlite3").read_bytes()
    for _ in range(2):  # the lock is free again after the first
        with pytest.raises(StoreUnusable, match=r"version 99.*knows 3"):
            Database(tmp_path)
    assert (tmp_path / "sessions.sqlite3").read_bytes() == before


@pytest.mark.parametrize("statement", ["CREATE TABLE mine (x)", "PRAGMA user_version = 1"])
def test_a_database_of_something_else_is_refused_and_left_alone(
    tmp_path: Path, statement: str
) -> None:
    with sqlite3.connect(tmp_path / "sessions.sqlite3") as other:
        other.execute(statement)
    other.close()
    path = tmp_path / "sessions.sqlite3"
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match="no store of this server"):
        Database(tmp_path)
    assert path.read_bytes() == before, "it is somebody's"
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="--store"):
        Database(tmp_path / "file" / "store")
    (tmp_path / "sessions.sqlite3").write_bytes(b"no database at all" * 99)
    with pytest.raises(StoreUnusable, match="--store"):
        Database(tmp_path)


def spoil(path: Path, how: str) -> None:
    """Have a database lose its content."""
    size = path.stat().st_size
    match how:
        case "gone":
            path.unlink()
        case "zeros":
            path.write_bytes(bytes(size))
        case "first page":
            path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
        case "another":
            path.unlink()
            sqlite3.connect(path).execute("VACUUM").connection.close()
        case _:
            os.truncate(path, int(how) if int(how) >= 0 else size + int(how))


LOSSES = [
    "gone",
    "zeros",
    "first page",
    "another",
    "0",
    "1",
    "99",
    "1000",
    "4096",
    "12288",
    "-16384",
]


@pytest.mark.parametrize("has_log", [False, True])
@pytest.mark.parametrize("how", LOSSES)
def test_a_store_that_has_lost_its_content_is_no_new_one(
    tmp_path: Path, how: str, has_log: bool
) -> None:
    directory = tmp_path / "store"
    database = Database(directory)
    with database.transaction():
        for number in range(1, 200):
            database.put(row(number), DATA)
    if has_log:  # as a process leaves it that is killed
        database._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with database.transaction():
            database.put(row(200), DATA)
        shutil.copytree(directory, tmp_path / "killed")
        database.close()
        directory = tmp_path / "killed"
    else:
        database.close()
    spoil(directory / "sessions.sqlite3", how)
    before = contents(directory)
    for is_read_only in (True, False, False):
        with pytest.raises(StoreUnusable) as refused:
            Database(directory, is_read_only=is_read_only)
        told = str(refused.value)
        assert f"{directory / 'sessions.sqlite3'} " in told
        assert f"mv {directory}" in told
        if is_read_only:
            assert contents(directory) == before
    directory.rename(tmp_path / "lost")
    Database(directory).close()


def contents(directory: Path) -> dict[str, bytes]:
    """All files, with their bytes; of an index of a log only that it is there."""
    return {
        file.name: b"" if file.name.endswith("-shm") else file.read_bytes()
        for file in directory.iterdir()
    }


@pytest.mark.parametrize("moment", ["made", "with tables", "before it says so"])
def test_a_store_whose_first_start_was_cut_short_begins_anew(tmp_path: Path, moment: str) -> None:
    """A process may be killed at any moment while it makes a store."""
    (tmp_path / "lock").touch()
    (tmp_path / "sessions.sqlite3").touch()
    if moment != "made":
        Database(tmp_path).close()
        os.truncate(tmp_path / "lock", 0)
    if moment == "with tables":
        with sqlite3.connect(tmp_path / "sessions.sqlite3") as made:
            made.execute("PRAGMA journal_mode = WAL")
        made.close()
    Database(tmp_path).close()
    assert (tmp_path / "lock").read_bytes()


@pytest.mark.parametrize("state", ["closed", "killed", "copied", "served"])
def test_reading_a_store_changes_no_file_of_it(tmp_path: Path, state: str) -> None:
    directory = tmp_path / "store"
    database = Database(directory)
    with database.transaction():
        database.put(row(1), DATA)
    match state:
        case "closed":
            database.close()
        case "killed" | "copied":
            left = tmp_path / "left"
            kept = ("*-shm", "lock") if state == "copied" else ("*-shm",)
            shutil.copytree(directory, left, ignore=shutil.ignore_patterns(*kept))
            database.close()
            directory = left
    before = contents(directory)
    reader = Database(directory, is_read_only=True)
    assert [each.session_id for each in reader.walk(None)] == ["s1"]
    reader.close()
    after = contents(directory)
    if state == "served":
        database.close()
    assert after == before


def test_no_server_begins_while_a_command_has_its_store_open(tmp_path: Path) -> None:
    Database(tmp_path).close()
    readers = [Database(tmp_path, is_read_only=True) for _ in range(2)]
    for reader in readers:
        with pytest.raises(StoreIsBusy, match="a command has it open"):
            Database(tmp_path)
        reader.close()
    command = Database(tmp_path)
    with pytest.raises(StoreIsBusy, match="a command has it open"):
        Database(tmp_path)
    command.close()
    server = Database(tmp_path)
    server.lock.serve()
    beside = Database(tmp_path, is_read_only=True)
    with pytest.raises(StoreIsServed, match="another server has it open"):
        Database(tmp_path)
    assert not issubclass(StoreIsServed, StoreIsBusy), "nobody waits for a server"
    for each in (beside, server):
        each.close()


@pytest.mark.parametrize("place", range(len(DATA)))
def test_no_changed_byte_of_an_entry_is_read(place: int) -> None:
    for bit in range(8):
        changed = bytearray(DATA)
        changed[place] ^= 1 << bit
        with pytest.raises(Damaged):
            decode_entry(bytes(changed))
    with pytest.raises(Damaged):
        decode_entry(DATA[:place])


@pytest.mark.parametrize("place", range(len(SETTINGS)))
def test_no_changed_byte_of_settings_is_read(place: int) -> None:
    changed = bytearray(SETTINGS)
    changed[place] ^= 1
    with pytest.raises(Damaged):
        decode_settings(bytes(changed))


def hang_until(goes_on: threading.Event, store: SessionStore) -> None:
    """The disk does not answer before this."""

    def hang(_database: Database) -> None:
        goes_on.wait()

    store.ask(hang, lambda _error: None)


async def opened(directory: Path) -> SessionStore:
    store = SessionStore.in_directory(
        directory, model=b"model", wall=lambda: 10.0, clock=lambda: 10.0
    )
    store.start(asyncio.get_running_loop())
    return store


def test_writes_that_are_asked_for_together_share_a_commit_and_are_told_in_order(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        store = SessionStore.in_directory(
            tmp_path, model=b"model", wall=lambda: 10.0, clock=lambda: 10.0
        )
        store._loop = asyncio.get_running_loop()  # the thread starts when all has been asked for
        told: list[tuple[int, Exception | None]] = []
        for number in range(1, 41):
            store.put(row(number), [DATA], lambda error, n=number: told.append((n, error)))
        store.start(asyncio.get_running_loop())
        await store.flush()
        assert told == [(number, None) for number in range(1, 41)]
        assert (store.counts.num_writes, count(store._database)[0]) == (40, 40)
        assert sum(store.counts.num_commits) <= 2
        await store.close()

    asyncio.run(run())


def test_a_write_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    async def run() -> None:
        store = SessionStore.in_directory(
            tmp_path, model=b"model", wall=lambda: 10.0, clock=lambda: 10.0
        )
        store._loop = asyncio.get_running_loop()  # the thread starts when all has been asked for
        told: dict[int, Exception | None] = {}

        def tell(number: int, error: Exception | None) -> None:
            told[number] = error

        store.put(row(1), [DATA], partial(tell, 1))
        store.append(row(2, num_entries=5), [DATA], partial(tell, 2))
        unsettled = msgspec.structs.replace(row(3), settings=None)
        store.put(unsettled, [DATA], partial(tell, 3))
        store.put(row(4), [DATA], partial(tell, 4))
        store.start(asyncio.get_running_loop())
        await store.flush()
        assert [type(told[number]) for number in (1, 2, 3, 4)] == [
            type(None),
            Behind,
            sqlite3.IntegrityError,
            type(None),
        ]
        assert store.counts.num_failed == 2
        assert [each.number for each in store.page(OWNER.owner_id, after=0, limit=9)] == [1, 4]
        await store.close()

    asyncio.run(run())


def test_a_commit_takes_no_more_writes_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_GROUP", 4)

    async def run() -> None:
        store = SessionStore.in_directory(
            tmp_path, model=b"model", wall=lambda: 10.0, clock=lambda: 10.0
        )
        store._loop = asyncio.get_running_loop()  # the thread starts when all has been asked for
        for number in range(1, 11):
            store.put(row(number), [DATA], lambda _error: None)
        store.start(asyncio.get_running_loop())
        await store.flush()
        assert sum(store.counts.num_commits) >= 3
        await store.close()

    asyncio.run(run())


def test_where_many_write_a_commit_waits_for_more_and_one_alone_never_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    is_over = threading.Event()
    rows = map(row, itertools.count(1))
    database = Database(tmp_path)
    commits = writer.GroupCommits(database, lambda tell: tell())

    def put(then: Callable[[], None] = lambda: None) -> None:
        new = next(rows)
        commits.ask(lambda into: into.put(new, DATA), lambda _error: then())

    def wait(wait_s: float) -> None:
        waits.append(wait_s)
        if len(waits) == 1:
            put()
            put()

    monkeypatch.setattr(writer.time, "sleep", wait)
    put()
    put(then=lambda: put(then=lambda: put(then=lambda: put(then=is_over.set))))
    commits.start()
    assert is_over.wait(10.0)
    assert commits.stop(10.0)
    database.close()
    # Two at once, then one that waits and meets two, one that waits in vain, and one alone.
    assert commits.counts.num_writes == 2 + 3 + 1 + 1
    assert (sum(commits.counts.num_commits), waits) == (4, [writer.GATHER_S] * 2)


def test_one_alone_does_not_wait_beside_what_nobody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    is_over = threading.Event()
    database = Database(tmp_path)
    commits = writer.GroupCommits(database, lambda tell: tell())
    monkeypatch.setattr(writer.time, "sleep", waits.append)
    commits.ask(lambda into: into.put(row(1), DATA), lambda _error: None)
    for number in range(5, 10):
        commits.ask_later(lambda into, number=number: into.delete(number), writer.tell_nobody)
    commits.start()
    commits.ask(None, lambda _error: is_over.set())
    assert is_over.wait(10.0)
    is_over.clear()
    commits.ask(lambda into: into.put(row(2), DATA), lambda _error: is_over.set())
    assert is_over.wait(10.0)
    assert commits.stop(10.0)
    database.close()
    assert not waits


def test_closing_writes_what_is_left_and_tells_of_it(tmp_path: Path) -> None:
    told: list[Exception | None] = []

    async def run() -> None:
        store = await opened(tmp_path)
        for number in range(1, 30):
            store.put(row(number), [DATA], told.append)
        await store.close()

    asyncio.run(run())
    assert told == [None] * 29
    database = Database(tmp_path)
    assert count(database) == (29, 29)
    database.close()


def test_a_deleted_session_is_not_found_while_it_is_being_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        store = await opened(tmp_path)
        store.put(row(1), [DATA], lambda _error: None)
        await store.flush()
        assert store.find(OWNER.owner_id, "s1") is not None
        store.deletions.delete(1)
        assert store.find(OWNER.owner_id, "s1") is None
        assert store.page(OWNER.owner_id, after=0, limit=9) == []
        store.put(row(2, name="s1"), [DATA], lambda _error: None)
        await store.flush()
        found = store.find(OWNER.owner_id, "s1")
        assert found is not None
        assert found.number == 2
        await store.close()

    asyncio.run(run())


def test_one_that_cannot_be_told_keeps_no_other_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        store = SessionStore.in_directory(
            tmp_path, model=b"model", wall=lambda: 10.0, clock=lambda: 10.0
        )
        store._loop = asyncio.get_running_loop()  # the thread starts when all has been asked for
        told: list[int] = []

        def fail(_error: Exception | None) -> None:
            raise RuntimeError("a bug on purpose")

        store.put(row(1), [DATA], fail)
        for number in range(2, 100):
            store.put(row(number), [DATA], lambda _error, n=number: told.append(n))
        store.start(asyncio.get_running_loop())
        await store.flush()
        assert told == list(range(2, 100))
        await store.close()

    asyncio.run(run())
    assert "could not be told" in caplog.text


@pytest.mark.parametrize("error", [ValueError("on purpose"), sqlite3.IntegrityError("twice")])
def test_a_bug_in_a_write_is_told_as_one_and_the_disk_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def run() -> None:
        store = SessionStore.in_directory(
            tmp_path, model=b"model", wall=lambda: 10.0, clock=lambda: 10.0
        )
        store.start(asyncio.get_running_loop())
        told: list[Exception | None] = []

        def write(_database: Database) -> None:
            raise error

        store.ask(write, told.append)
        await store.flush()
        assert (told, store.failure) == ([error], None)
        await store.close()

    asyncio.run(run())
    assert "a write of the store: a bug of ours" in caplog.text
    assert "cannot be written to" not in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        OSError("dead"),
        MemoryError(),
        sqlite3.OperationalError("full"),
        sqlite3.DatabaseError("malformed"),
    ],
)
def test_what_the_disk_or_the_memory_has_refused_counts_as_failing(
    tmp_path: Path, error: Exception
) -> None:
    async def run() -> None:
        store = SessionStore.in_directory(
            tmp_path, model=b"model", wall=lambda: 10.0, clock=lambda: 10.0
        )
        store.start(asyncio.get_running_loop())

        def write(_database: Database) -> None:
            raise error

        store.ask(write, lambda _error: None)
        await store.flush()
        assert store.failure is not None
        await store.close()

    asyncio.run(run())


def test_a_locked_database_fails_a_group_at_once_and_not_one_write_after_the_other(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        store = SessionStore.in_directory(
            tmp_path, model=b"model", wall=lambda: 10.0, clock=lambda: 10.0
        )
        store._loop = asyncio.get_running_loop()  # the thread starts when all has been asked for
        other = sqlite3.connect(tmp_path / "sessions.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        errors: list[Exception | None] = []
        for number in range(1, 21):
            store.put(row(number), [DATA], errors.append)
        begun_s = time.monotonic()
        store.start(asyncio.get_running_loop())
        await store.flush()
        assert [type(error) for error in errors] == [sqlite3.OperationalError] * 20
        assert time.monotonic() - begun_s < 8.0  # twenty of them would take twenty seconds
        assert store.failure is not None
        other.execute("ROLLBACK")
        other.close()
        store.put(row(1), [DATA], lambda _error: None)
        await store.flush()
        assert (store.failure, count(store._database)[0]) == (None, 1)
        await store.close()

    asyncio.run(run())


def test_the_end_of_a_server_waits_for_a_disk_that_hangs_no_longer_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_store, "CLOSE_WAIT_S", 0.1)
    goes_on = threading.Event()

    async def run() -> None:
        store = await opened(tmp_path)
        hang_until(goes_on, store)
        await store.close()

    asyncio.run(run())
    assert "the disk does not answer" in caplog.text
    goes_on.set()


def test_what_was_deleted_is_not_left_in_the_files(tmp_path: Path) -> None:
    change = msgspec.structs.replace(ENTRY.change, tools=("a secret of a client",))

    async def run() -> None:
        store = await opened(tmp_path)
        store.put(row(1), [encode_entry(LogEntry(change, ENTRY.turns))], lambda _error: None)
        await store.flush()
        store.deletions.delete(1)
        await store.close()

    asyncio.run(run())
    for file in tmp_path.iterdir():
        assert b"a secret of a client" not in file.read_bytes(), file.name


def secrets_in(directory: Path) -> list[str]:
    """The files that have something which was deleted."""
    secret = b"a secret of a client"
    return [each.name for each in directory.iterdir() if secret in each.read_bytes()]


async def tell_a_secret(store: SessionStore, number: int) -> None:
    change = msgspec.structs.replace(ENTRY.change, tools=("a secret of a client",))
    entry = encode_entry(LogEntry(change, ENTRY.turns))
    store.put(row(number), [entry], lambda _error: None)
    await store.flush()


async def soon(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not is_so():
            await asyncio.sleep(0.005)


def test_what_was_deleted_is_gone_from_the_log_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "ERASED_EVERY_S", 0.2)
    emptied: list[float] = []
    shorten = Database.shorten_log

    def note(database: Database, *, erases: bool) -> None:
        if erases:
            emptied.append(time.monotonic())
        shorten(database, erases=erases)

    monkeypatch.setattr(Database, "shorten_log", note)

    async def run() -> None:
        store = await opened(tmp_path)
        for number in range(1, 30):
            await tell_a_secret(store, number)
            store.deletions.delete(number)
            await store.flush()
            await asyncio.sleep(0.02)
        await soon(lambda: not secrets_in(tmp_path))
        num_emptied = len(emptied)
        await asyncio.sleep(0.5)
        assert len(emptied) == num_emptied, "nothing was deleted since"
        await store.close()

    asyncio.run(run())
    assert all(later - before >= 0.2 for before, later in itertools.pairwise(emptied))


def test_what_was_deleted_before_a_crash_is_gone_from_the_log_soon(tmp_path: Path) -> None:
    def read_beside() -> sqlite3.Connection:
        """Somebody reads, and so the log stays."""
        beside = sqlite3.connect(tmp_path / "one" / Database.FILE)
        beside.execute("BEGIN")
        beside.execute("SELECT * FROM sessions").fetchall()
        return beside

    async def run() -> None:
        store = await opened(tmp_path / "one")
        await tell_a_secret(store, 1)
        beside = read_beside()
        store.deletions.delete(1)
        await store.flush()
        await asyncio.sleep(0.1)
        assert secrets_in(tmp_path / "one")
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        beside.close()
        await store.close()
        store = await opened(tmp_path / "two")
        await soon(lambda: not secrets_in(tmp_path / "two"))
        await store.close()

    asyncio.run(run())


HANGS, TOO_MUCH = "the disk does not answer", "too much waits to be written"


def test_a_write_to_a_disk_that_hangs_fails_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "DISK_WAIT_S", 0.1)
    monkeypatch.setattr(session_store, "MAX_WAITING_BYTES", 2 * len(DATA))
    goes_on = threading.Event()

    async def run() -> None:
        store = await opened(tmp_path)
        hang_until(goes_on, store)
        told: list[tuple[int, str]] = []
        for number in (1, 2, 3):
            much = [DATA, DATA, DATA] if number == 1 else [DATA]
            store.put(row(number), much, lambda error, n=number: told.append((n, str(error))))
        await asyncio.sleep(0)
        assert told == [(2, TOO_MUCH), (3, TOO_MUCH)], "no more than the bound, or one alone"
        await store.flush()
        assert [number for number, _ in told] == [2, 3, 1]
        assert store.failure == HANGS
        goes_on.set()
        while count(store._database)[0] < 1:
            await asyncio.sleep(0.01)
        await store.flush()
        assert [number for number, _ in told] == [2, 3, 1], "nobody is told twice"
        store.put(row(4), [DATA], lambda error: told.append((4, str(error))))
        await store.flush()
        assert (told[-1], store.failure) == ((4, "None"), None)
        await store.close()

    asyncio.run(run())


MAIN, LOG, INDEX = "sessions.sqlite3", "sessions.sqlite3-wal", "sessions.sqlite3-shm"


CUT = [(MAIN, "cut short"), (LOG, "cut short")]
MOVED = [
    (name, how) for name in (MAIN, LOG, INDEX, "lock", "") for how in ("gone", "replaced", "copied")
]


@pytest.mark.parametrize(("name", "how"), CUT + MOVED)
def test_nothing_is_told_to_be_written_to_files_that_are_not_there_any_more(
    tmp_path: Path, name: str, how: str
) -> None:
    directory = tmp_path / "store"
    database = Database(directory)
    with database.transaction():
        database.put(row(1), DATA)
    lose(directory / name, how)

    def write() -> None:
        with database.transaction():
            database.put(row(2), DATA)

    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="store's files"):
            write()
    database.close()


def lose(path: Path, how: str) -> None:
    """Have a name lead elsewhere, or a file be cut short."""
    if how == "cut short":
        os.truncate(path, 0)
        return
    lost = path.with_name("lost")
    path.rename(lost)
    if how == "replaced":
        path.write_bytes(b"")
    elif how == "copied":
        (shutil.copytree if lost.is_dir() else shutil.copy)(lost, path)


@pytest.mark.parametrize("name", [MAIN, LOG])
def test_what_is_lost_during_a_commit_is_not_told_to_be_written(tmp_path: Path, name: str) -> None:
    database = Database(tmp_path)

    def write() -> None:
        with database.transaction():
            database.put(row(1), DATA)
            (tmp_path / name).unlink()

    with pytest.raises(sqlite3.OperationalError, match="store's files"):
        write()
    database.close()


def test_what_was_written_before_its_log_was_removed_outlives_the_process(tmp_path: Path) -> None:
    database = Database(tmp_path / "store")
    with database.transaction():
        database.put(row(1), DATA)
    (tmp_path / "store" / LOG).unlink()
    with pytest.raises(sqlite3.OperationalError, match="gone"), database.transaction():
        pytest.fail("nothing is written")
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    database.close()
    again = Database(tmp_path / "killed")
    assert again.find(OWNER.owner_id, "s1") is not None
    again.close()


@pytest.mark.parametrize("what", ["VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"])
def test_what_another_program_may_do_to_a_store_is_no_loss(tmp_path: Path, what: str) -> None:
    database = Database(tmp_path)
    for _ in range(2):
        with database.transaction():
            for number in range(1, 400):
                database.put(row(number), DATA)
        with database.transaction():
            for number in range(1, 399):
                database.delete(number)
        other = sqlite3.connect(tmp_path / MAIN, isolation_level=None)
        other.execute(what)
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        other.close()
    with database.transaction():
        database.put(row(9), DATA)
    assert count(database) == (2, 399)
    database.close()


def test_a_store_without_its_secret_is_refused(tmp_path: Path) -> None:
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / "sessions.sqlite3") as other:
        other.execute("DELETE FROM facts")
    other.close()
    with pytest.raises(StoreUnusable, match="lost its secret"):
        Database(tmp_path)
