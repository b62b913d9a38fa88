"""The log beside a store: it stays short while a server runs, and of a long one only what counts is
written again at the next start."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from session_server.sessions.store import directories, log_frames
from session_server.sessions.store.database import Database
from session_server.sessions.store.log_frames import committed_bytes, log_of, size_of
from session_server.sessions.store.session_store import SessionStore
from tests.sessions.test_store import DATA, row

LIMIT = 1 << 20
MUCH = bytes(LIMIT // 8)


def test_the_log_is_emptied_behind_a_commit_and_nobody_who_reads_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_frames, "MAX_LOG_BYTES", LIMIT)
    log = log_of(tmp_path / Database.FILE)

    async def run() -> None:
        store = SessionStore.in_directory(
            tmp_path, model=b"model", wall=lambda: 10.0, clock=lambda: 10.0
        )
        store.start(asyncio.get_running_loop())
        numbers = iter(range(1, 1000))

        async def write(times: int) -> int:
            for _ in range(times):
                store.put(row(next(numbers)), [MUCH], told.append)
                await store.flush()
            await store.flush()  # what comes behind a commit is done before the next one
            return size_of(log)

        told: list[Exception | None] = []
        assert await write(30) <= 2 * LIMIT
        with closing(Database(tmp_path, is_read_only=True)) as reader:
            slices = reader.slices()
            num_seen = len(next(slices))
            assert await write(30) > 3 * LIMIT, "what a reader has is left for it"
            assert len(reader._rows("number > ?", (0,))) == num_seen == 30
            slices.close()
        assert await write(2) <= 2 * LIMIT
        for number in range(1, 50):
            store.deletions.delete(number)
        assert await write(1) <= 2 * LIMIT
        assert told == [None] * 63
        assert store.failure is None
        await store.close()

    asyncio.run(run())


def left_by_a_kill(database: Database, directory: Path) -> Path:
    """The files as they are now, without the index."""
    copy = directory / "killed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(database.path.parent, copy, ignore=shutil.ignore_patterns("*-shm"))
    return copy


def put(database: Database, number: int, entry: bytes = DATA) -> None:
    with database.transaction():
        database.put(row(number), entry)


def test_a_start_writes_no_more_of_a_log_than_sqlite_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_written = 0
    pwrite = os.pwrite

    def count(fd: int, data: bytes, offset: int) -> int:
        nonlocal num_written
        num_written += len(data)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(directories.os, "pwrite", count)
    with closing(Database(tmp_path / "store")) as database:
        put(database, 1, bytes(4 * LIMIT))
        database._writer.execute("PRAGMA wal_checkpoint(RESTART)")
        for number in (2, 3):
            put(database, number)
        copy = left_by_a_kill(database, tmp_path)
    size = size_of(log_of(copy / Database.FILE))
    assert size > 4 * LIMIT
    with closing(Database(copy)) as again:
        assert [each.number for each in again.walk(None)] == [1, 2, 3]
    assert 0 < num_written < LIMIT


@pytest.mark.parametrize("kind", ["whole", "restarted", "uncommitted", "torn", "rubbish", "none"])
def test_what_is_cut_off_is_nothing_that_sqlite_reads(tmp_path: Path, kind: str) -> None:
    with closing(Database(tmp_path / "store")) as database:
        for number in range(1, 6):
            put(database, number, bytes(50_000))
        if kind == "restarted":
            database._writer.execute("PRAGMA wal_checkpoint(RESTART)")
            put(database, 6)
        if kind == "none":
            database._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if kind == "uncommitted":
            database._writer.execute("PRAGMA cache_size = 1")
            database._writer.execute("BEGIN IMMEDIATE")
            database.put(row(7), bytes(400_000))
        copy = left_by_a_kill(database, tmp_path)
        if kind == "uncommitted":
            database._writer.execute("ROLLBACK")
    log = log_of(copy / Database.FILE)
    if kind == "torn":
        os.truncate(log, size_of(log) - 100)
    if kind == "rubbish":
        log.write_bytes(log.read_bytes() + bytes(range(256)) * 40)
    size = size_of(log)
    num_bytes = min(committed_bytes(log), size)
    assert (num_bytes == size) == (kind in {"whole", "torn", "none"})
    cut = tmp_path / "cut"
    shutil.copytree(copy, cut)
    os.truncate(log_of(cut / Database.FILE), num_bytes)
    held = []
    for directory in (copy, cut):
        with closing(Database(directory)) as opened:
            rows = list(opened.walk(None))
            held.append([(each, opened.entries(each.number)) for each in rows])
    assert held[0] == held[1]
    assert len(held[0]) == {"restarted": 6, "torn": 4}.get(kind, 5)
