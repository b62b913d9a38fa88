"""The simulated disk itself: what a recording says, what a crash may leave, and what it may not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.disk.campaign import Campaign, Report
from tests.disk.files import BUGS, FileHistory
from tests.disk.recording import Kind, Operation, Watched
from tests.disk.simulated_disk import Image, SimulatedDisk, crashes
from tests.disk.store_runs import watched_disk
from tests.rig.decisions import Decisions

ROOT = 99
SECTORS = [bytes([65 + at]) * 512 for at in range(4)]


def did(kind: Kind, inode: int, path: str = "", data: bytes = b"", **rest: int) -> Operation:
    return Operation(kind, inode, rest.get("offset", 0), 0, rest.get("error", 0), path, "", data)


def images(done: Sequence[Operation]) -> list[Image]:
    disk = SimulatedDisk(ROOT)
    for operation in done:
        disk.apply(operation)
    return list(crashes(disk, Decisions(1), num_drawn=100))


CREATED = [
    did(Kind.CREATE, 1, "a"),
    did(Kind.WRITE, 1, data=SECTORS[0] * 2),
    did(Kind.SYNC, 1),
    did(Kind.SYNC, ROOT),
]


def test_what_was_synced_is_there_and_nothing_else_for_sure() -> None:
    assert images(CREATED) == [{"a": SECTORS[0] * 2}]
    unnamed = images(CREATED[:3])
    assert {} in unnamed
    assert {"a": SECTORS[0] * 2} in unnamed
    unwritten = images([CREATED[0], CREATED[1], CREATED[3]])
    assert {image["a"] for image in unwritten} >= {b"", SECTORS[0], SECTORS[0] * 2}


def test_a_write_over_what_was_synced_may_be_torn_at_any_sector_and_at_any_byte() -> None:
    over = did(Kind.WRITE, 1, data=SECTORS[1] * 2)
    found = {image["a"] for image in images([*CREATED, over])}
    for first in SECTORS[:2]:
        for second in SECTORS[:2]:
            assert first + second in found
    assert any(len(set(data[:512])) == 2 for data in found if data)


def test_of_two_writes_the_later_may_be_there_alone() -> None:
    two = [did(Kind.WRITE, 1, data=SECTORS[at], offset=512 * at) for at in (2, 3)]
    found = {image["a"] for image in images([*CREATED, *two])}
    assert SECTORS[0] * 2 + bytes(512) + SECTORS[3] in found


def test_a_sync_that_failed_is_not_made_good_by_the_next_one_but_by_a_write() -> None:
    over = did(Kind.WRITE, 1, data=SECTORS[1] * 2)
    failed = [*CREATED, over, did(Kind.SYNC, 1, error=5), did(Kind.SYNC, 1)]
    assert {"a": SECTORS[0] * 2} in images(failed)
    again = [*failed, over, did(Kind.SYNC, 1)]
    assert {image["a"] for image in images(again)} == {SECTORS[1] * 2}


def test_the_number_of_a_file_may_be_given_again() -> None:
    later = [did(Kind.UNLINK, 1, "a"), did(Kind.CREATE, 1, "b"), did(Kind.SYNC, ROOT)]
    assert images([*CREATED, *later]) == [{"b": b""}]


def files_crashed(watched: Watched, bug: str) -> Report:
    environment = {**os.environ, **watched.environment, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "tests.disk.files", str(watched.log), bug]
    subprocess.run(command, cwd=watched.root, env=environment, check=True)
    return Campaign(Decisions(1, bug)).run(watched.inode, watched.operations(), FileHistory())


def test_a_file_that_is_written_beside_the_old_one_is_always_whole() -> None:
    with watched_disk() as watched:
        report = files_crashed(watched, "")
    assert not report.problems, report.problems
    assert report.saw["writing"] > 20


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_writing_a_file_is_found(bug: str) -> None:
    with watched_disk() as watched:
        assert files_crashed(watched, bug).problems


def test_every_kind_of_call_is_seen(tmp_path: Path) -> None:
    program = """
import os
os.makedirs('d/e'); fd = os.open('d/a', os.O_CREAT | os.O_RDWR)
os.write(fd, b'one'); os.pwrite(fd, b'two', 8); os.writev(fd, [b'th', b'ree'])
os.pwritev(fd, [b'fo', b'ur'], 20); os.ftruncate(fd, 22); os.fsync(fd); os.fdatasync(fd)
os.rename('d/a', 'd/b'); os.link('d/b', 'd/c'); os.unlink('d/b'); os.close(fd)
at = os.open('d', os.O_RDONLY); os.fsync(at); os.rmdir('d/e')
os.rename('c', 'f', src_dir_fd=at, dst_dir_fd=at); open('d/f', 'ab').write(b'end')
"""
    watched = Watched(tmp_path / "root", tmp_path)
    environment = {**os.environ, **watched.environment}
    subprocess.run([sys.executable, "-c", program], cwd=watched.root, env=environment, check=True)
    done = watched.operations()
    assert {operation.kind for operation in done} == set(Kind) - {Kind.NOTE}
    disk = SimulatedDisk(watched.inode)
    for operation in done:
        disk.apply(operation)
    image = disk.image(lambda _, pending: pending.whole)
    assert image == {"d": None, "d/f": (watched.root / "d" / "f").read_bytes()}
    assert image["d/f"] == b"onethreetwo".ljust(20, b"\0") + b"foend"
