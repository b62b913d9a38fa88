"""The store itself: its files, its lock, its versions, and commits of many writes at once."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from session_server.sessions.history_change import AnswersChange, HistoryChange, ItemsChange
from session_server.sessions.store import writer
from session_server.sessions.store.database import Behind, Database, StoreUnusable
from session_server.sessions.store.records import (
    Damaged,
    EndRecord,
    LogEntry,
    SessionRow,
    StoredSettings,
    decode_entry,
    encode_entry,
)
from session_server.sessions.store.session_store import SessionStore

SETTINGS = StoredSettings(900.0, {"k": "v"}, False, 1.0, b"digest", None, 1.0)
ENTRY = LogEntry(
    HistoryChange(
        0, b"\x01\0\0\0", ItemsChange(0, (), 1), AnswersChange(0, (), ()), ("t",), 1, False, 0
    ),
    (EndRecord((1 << 64) - 1, b"record"),),
)
DATA = encode_entry(ENTRY)


def row(number: int, *, name: str | None = None, num_entries: int = 0, **kept: float) -> SessionRow:
    return SessionRow(
        number,
        "owner",
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
    found = database.find("owner", "s7")
    assert found == row(7, num_entries=2, expires_s=5.0)
    assert [decode_entry(data) for data in database.entries(7)] == [ENTRY, ENTRY]
    assert database.count() == (1, 7)
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
    assert database.count() == (1, 1)
    assert len(database.entries(1)) == 1


def test_a_session_written_again_replaces_all_that_had_its_name_or_number(
    database: Database,
) -> None:
    with database.transaction():
        for number in (1, 2):
            database.put(row(number), DATA)
            database.append(row(number, num_entries=1), DATA)
        database.put(row(1, name="s2"), DATA)
    assert database.count() == (1, 1)
    assert [len(database.entries(number)) for number in (1, 2)] == [1, 0]


def test_pages_and_what_has_expired_come_in_order_and_no_more_than_asked_for(
    database: Database,
) -> None:
    with database.transaction():
        for number in (5, 3, 9, 7):
            database.put(row(number, expires_s=float(number)), DATA)
        database.delete(7)
    assert [each.number for each in database.page("owner", after=3, limit=1)] == [5]
    assert [each.number for each in database.page("owner", after=0, limit=9)] == [3, 5, 9]
    assert [each.number for each in database.expired(9.0, limit=9)] == [3, 5]
    assert database.page("stranger", after=0, limit=9) == []


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


@pytest.mark.parametrize("name", ["lock", "sessions.sqlite3"])
def test_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnusable, match="--store"):
        Database(tmp_path / "store")
    assert not (tmp_path / "elsewhere").exists()


def test_a_store_of_a_later_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / "sessions.sqlite3") as other:
        other.execute("PRAGMA user_version = 99")
    other.close()
    before = (tmp_path / "sessions.sqlite3").read_bytes()
    for _ in range(2):  # the lock is free again after the first
        with pytest.raises(StoreUnusable, match=r"version 99.*knows 1"):
            Database(tmp_path)
    assert (tmp_path / "sessions.sqlite3").read_bytes() == before


@pytest.mark.parametrize("statement", ["CREATE TABLE mine (x)", "PRAGMA user_version = 1"])
def test_a_database_of_something_else_is_refused(tmp_path: Path, statement: str) -> None:
    with sqlite3.connect(tmp_path / "sessions.sqlite3") as other:
        other.execute(statement)
    other.close()
    with pytest.raises(StoreUnusable, match="no store of this server"):
        Database(tmp_path)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="--store"):
        Database(tmp_path / "file" / "store")
    (tmp_path / "sessions.sqlite3").write_bytes(b"no database at all" * 99)
    with pytest.raises(StoreUnusable, match="--store"):
        Database(tmp_path)


@pytest.mark.parametrize("place", range(len(DATA)))
def test_no_changed_byte_of_an_entry_is_read(place: int) -> None:
    for bit in range(8):
        changed = bytearray(DATA)
        changed[place] ^= 1 << bit
        with pytest.raises(Damaged):
            decode_entry(bytes(changed))
    with pytest.raises(Damaged):
        decode_entry(DATA[:place])


async def opened(directory: Path) -> SessionStore:
    store = SessionStore(directory, model=b"model", wall_clock=lambda: 10.0)
    store.start(asyncio.get_running_loop())
    return store


def test_writes_that_are_asked_for_together_share_a_commit_and_are_told_in_order(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        store = SessionStore(tmp_path, model=b"model", wall_clock=lambda: 10.0)
        told: list[tuple[int, Exception | None]] = []
        for number in range(1, 41):
            store.put(row(number), DATA, lambda error, n=number: told.append((n, error)))
        store.start(asyncio.get_running_loop())
        await store.flush()
        assert told == [(number, None) for number in range(1, 41)]
        assert (store.counts.num_writes, store.num_sessions) == (41, 40)
        assert sum(store.counts.num_commits) <= 2
        await store.close()

    asyncio.run(run())


def test_a_write_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    async def run() -> None:
        store = SessionStore(tmp_path, model=b"model", wall_clock=lambda: 10.0)
        told: dict[int, Exception | None] = {}

        def tell(number: int, error: Exception | None) -> None:
            told[number] = error

        store.put(row(1), DATA, partial(tell, 1))
        store.append(row(2, num_entries=5), DATA, partial(tell, 2))
        store.put(row(3), None, partial(tell, 3))  # type: ignore[arg-type]
        store.put(row(4), DATA, partial(tell, 4))
        store.start(asyncio.get_running_loop())
        await store.flush()
        assert [type(told[number]) for number in (1, 2, 3, 4)] == [
            type(None),
            Behind,
            sqlite3.IntegrityError,
            type(None),
        ]
        assert store.counts.num_failed == 2
        assert [each.number for each in store.page("owner", after=0, limit=9)] == [1, 4]
        await store.close()

    asyncio.run(run())


def test_a_commit_takes_no_more_writes_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_GROUP", 4)

    async def run() -> None:
        store = SessionStore(tmp_path, model=b"model", wall_clock=lambda: 10.0)
        for number in range(1, 11):
            store.put(row(number), DATA, lambda _error: None)
        store.start(asyncio.get_running_loop())
        await store.flush()
        assert sum(store.counts.num_commits) >= 3
        await store.close()

    asyncio.run(run())


def test_closing_writes_what_is_left_and_tells_of_it(tmp_path: Path) -> None:
    told: list[Exception | None] = []

    async def run() -> None:
        store = await opened(tmp_path)
        for number in range(1, 30):
            store.put(row(number), DATA, told.append)
        await store.close()

    asyncio.run(run())
    assert told == [None] * 29
    database = Database(tmp_path)
    assert database.count() == (29, 29)
    database.close()


def test_a_deleted_session_is_not_found_while_it_is_being_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        store = await opened(tmp_path)
        store.put(row(1), DATA, lambda _error: None)
        await store.flush()
        assert store.find("owner", "s1") is not None
        store.delete("owner", "s1", 1)
        assert store.find("owner", "s1") is None
        assert store.page("owner", after=0, limit=9) == []
        assert store.expired(limit=9) == []
        store.put(row(2, name="s1"), DATA, lambda _error: None)
        await store.flush()
        found = store.find("owner", "s1")
        assert found is not None
        assert found.number == 2
        await store.close()

    asyncio.run(run())
