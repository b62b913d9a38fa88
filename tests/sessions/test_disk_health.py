"""What a store says of its disk, and how often."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest

from session_server.sessions.store.disk_health import QUIET_S, DiskHealth, explain

Usage = namedtuple("Usage", "total used free")
Logged = pytest.LogCaptureFixture


def sqlite_error(code: int, told: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(told)
    error.sqlite_errorcode = code  # type: ignore[misc]
    return error


FULL = sqlite_error(sqlite3.SQLITE_FULL, "database or disk is full")
NO_INDEX = sqlite_error(sqlite3.SQLITE_IOERR_SHMSIZE, "disk I/O error")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("error", "free_bytes", "told"),
    [
        (FULL, 0, "database or disk is full (0 bytes free): make room"),
        (NO_INDEX, 4096, "disk I/O error; the disk is full (4,096 bytes free): make room"),
        (
            NO_INDEX,
            1 << 30,
            "disk I/O error (1,073,741,824 bytes free): a quota may be full, or the device fails",
        ),
        (OSError(errno.ENOSPC, "No space"), 0, "no space; the disk is full (0 bytes"),
        (OSError(errno.EACCES, "Not yours"), 0, "not yours"),
        (sqlite_error(sqlite3.SQLITE_BUSY, "database is locked"), 0, "database is locked"),
    ],
)
def test_an_error_says_how_much_room_there_is_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, *, error: Exception, free_bytes: int, told: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(1 << 40, 0, free_bytes))
    assert explain(error, Path(os.sep)).startswith(told)


def test_a_full_disk_that_has_kv_too_is_told_what_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(1 << 40, 0, 0))
    assert explain(FULL, tmp_path).endswith("make room")
    (tmp_path / "kv").mkdir()
    assert explain(FULL, tmp_path).endswith(f"make room (all of {tmp_path}/kv may go at any time)")


def test_the_log_tells_of_a_full_disk_once_a_minute_whatever_finds_room_meanwhile(
    tmp_path: Path, caplog: Logged
) -> None:
    clock = Clock()
    health = DiskHealth(str(tmp_path), partial(explain, directory=tmp_path), clock)
    for _ in range(100):
        health.note_write(FULL)
        assert health.failure is not None
        health.note_write(None)
        assert health.failure is None
        clock.now_s += 2.0
    told = [record.levelname for record in caplog.records]
    assert told == ["ERROR", "WARNING"] * 4
    assert str(tmp_path) in caplog.text
    health.note_write(FULL)  # the last minute is not over
    clock.now_s += QUIET_S
    health.note_write(FULL)
    assert caplog.records[-1].levelname == "ERROR"


def test_a_disk_that_could_not_be_read_counts_as_failing_for_a_while(
    tmp_path: Path, caplog: Logged
) -> None:
    clock = Clock()
    health = DiskHealth(str(tmp_path), partial(explain, directory=tmp_path), clock)
    for _ in range(3):
        health.note_unread(NO_INDEX)
        health.note_write(None)
        assert health.failure is not None
        assert "disk I/O error" in health.failure
    assert len(caplog.records) == 1
    clock.now_s += QUIET_S
    assert health.failure is None
