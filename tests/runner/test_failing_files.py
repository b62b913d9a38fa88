"""What is no file of KV but has its name, files that change while they are read, and disks that
fail at any call: nothing wrong is used, nothing leaks, and nothing unfinished stays.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from session_server.runner import segment_format
from session_server.runner.kv_directory import OWNER
from session_server.runner.segment_files import SegmentFiles, file_name
from session_server.runner.segment_format import FileRefused
from tests.depth import at_depth
from tests.runner.kv_files import (
    FULL,
    LAYOUT,
    REFUSED,
    STATE,
    FailingDisk,
    Shelf,
    Written,
    found_of,
    open_descriptors,
    path_of,
    payload_of,
    with_header,
    written,
)

ROOT = Path(__file__).resolve().parents[2]

Spoil = Callable[[Path, Written], None]
"""Put something else in place of a file."""


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "kv")


# In its place


def link(path: Path, segment: Written) -> None:
    target = path.with_name("target")
    target.write_bytes(segment.raw)
    path.symlink_to(target)


def broken_link(path: Path, _: Written) -> None:
    path.symlink_to("nowhere")


def fifo(path: Path, _: Written) -> None:
    os.mkfifo(path)


def directory(path: Path, _: Written) -> None:
    path.mkdir()


def full_directory(path: Path, _: Written) -> None:
    path.mkdir()
    (path / "file").write_text("")


def device(path: Path, _: Written) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # endless zeros
    except PermissionError:
        pytest.skip("devices are made by root")


def unix_socket(path: Path, _: Written) -> None:
    directory = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"/proc/self/fd/{directory}/{path.name}")  # a path of any length
    os.close(directory)


def nothing(path: Path, _: Written) -> None:
    pass


PLACES: list[Spoil] = [link, broken_link, fifo, directory, full_directory, device, unix_socket]


@pytest.mark.parametrize("place", [*PLACES, nothing], ids=lambda place: place.__name__)
def test_what_is_no_file_is_refused(shelf: Shelf, place: Spoil) -> None:
    shelf.path.unlink()
    place(shelf.path, shelf.segment)
    assert not shelf.is_read()
    if place is link:
        assert shelf.path.with_name("target").read_bytes() == shelf.segment.raw


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_is_put_aside_stays_few(shelf: Shelf, place: Spoil) -> None:
    aside = shelf.directory / REFUSED
    for seed in range(7):
        found = found_of(path_of(seed=seed))
        path = shelf.directory / file_name(found.file.file_id)
        path.unlink(missing_ok=True)
        place(path, shelf.segment)
        (shelf.directory / "target").unlink(missing_ok=True)
        assert shelf.files.find(found.file, found.tokens)[1]
    # Of directories, which nobody but a person makes, none is removed.
    most = 7 if place in (directory, full_directory) else 4
    assert len(os.listdir(aside)) == most


# While it is read


def at_call(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, act: Callable[[], object]
) -> None:
    """Act before the call of a function of `os` that has this number."""
    real, calls = getattr(os, name), itertools.count()

    def called(*args: Any, **keywords: Any) -> Any:
        if next(calls) == number:
            act()
        return real(*args, **keywords)

    monkeypatch.setattr(os, name, called)


@pytest.mark.parametrize("call", range(6))
def test_a_file_that_is_cut_while_it_is_read_is_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    num_open = open_descriptors()
    at_call(monkeypatch, "preadv", call, lambda: os.truncate(shelf.path, 200))
    with pytest.raises(FileRefused, match="ends early"):
        shelf.files.read(shelf.segment.found)
    assert open_descriptors() == num_open


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shelf.directory / "other"
    other.write_bytes(b"something else")
    at_call(monkeypatch, "preadv", 1, lambda: other.rename(shelf.path))
    payload = shelf.files.read(shelf.segment.found)
    assert np.array_equal(payload[STATE][1], shelf.segment.payload[STATE][1])
    assert not shelf.is_read()


def test_a_file_that_is_overwritten_while_it_is_read_is_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = with_header(shelf.segment, shelf.segment.header)[:-1] + b"\0"
    at_call(monkeypatch, "preadv", 2, lambda: shelf.path.write_bytes(other))
    with pytest.raises(FileRefused):
        shelf.files.read(shelf.segment.found)


def test_short_reads_and_writes_are_gone_on_with(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [to[0][:7]], at))
    found = found_of(path_of(seed=2))
    payload = payload_of(found)
    shelf.files.write(found, payload, 0)
    assert all(map(np.array_equal, shelf.files.read(found)[FULL], payload[FULL]))


# A disk that fails

WRITING = ("open", "write", "fsync", "close", "rename", "unlink")
READING = ("open", "fstat", "pread", "preadv", "rename", "scandir", "unlink")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE])
def test_a_disk_that_fails_at_any_call_of_a_write_keeps_nothing_of_it(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    num_open, before = open_descriptors(), set(os.listdir(shelf.directory))
    disk = FailingDisk(monkeypatch, WRITING)
    found = found_of(path_of(seed=2))
    for at in itertools.count():
        disk.begin(at, code=code)
        try:
            shelf.files.write(found, payload_of(found), 0)
        except OSError as error:
            assert error.errno == code  # noqa: PT017 - what else it is, the next line says
            assert set(os.listdir(shelf.directory)) == before, f"call {at}"
        finally:
            assert open_descriptors() == num_open
        if not disk.has_struck:
            break
    assert at > 8
    disk.begin(-1)
    assert shelf.files.read(found).keys() == LAYOUT.pools.keys()


def test_what_a_dead_disk_keeps_of_a_write_is_removed_when_files_are_listed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, WRITING)
    found = found_of(path_of(seed=2))
    for at in itertools.count():
        disk.begin(at, lasts=True)
        with contextlib.suppress(OSError):
            shelf.files.write(found, payload_of(found), 0)
        if not disk.has_struck:
            break
        disk.begin(-1)
        listed = {name for name, _ in shelf.files.listing(1000)}
        left = {name for name in os.listdir(shelf.directory) if name not in (REFUSED, OWNER)}
        assert left == {file_name(name) for name in listed}, f"call {at}"


@pytest.mark.parametrize("lasts", [False, True])
def test_a_disk_that_fails_at_any_call_of_a_read_gives_nothing_that_is_wrong(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, lasts: bool
) -> None:
    num_open, payload = open_descriptors(), shelf.segment.payload
    disk = FailingDisk(monkeypatch, READING)
    for at in itertools.count():
        shelf.path.write_bytes(shelf.segment.raw)
        disk.begin(at, lasts=lasts)
        try:
            read = shelf.files.read(shelf.segment.found)
            assert all(map(np.array_equal, read[FULL], payload[FULL]))
        except FileRefused:
            pass
        has_struck = disk.has_struck
        shelf.path.write_bytes(shelf.segment.raw)
        disk.begin(at, lasts=lasts)
        shelf.files.find(shelf.segment.found.file, shelf.tokens)
        assert open_descriptors() == num_open
        if not has_struck:
            break
    assert at > 5


def test_a_disk_that_fails_half_way_through_a_path_gives_what_lies_before(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = np.concatenate([shelf.tokens, path_of(2, seed=3)])
    second = written(shelf.files, shelf.directory, found_of(longer, len(shelf.tokens)))
    disk = FailingDisk(monkeypatch, ("pread",))
    disk.begin(2)
    found, has_refused = shelf.files.find(shelf.segment.found.file, longer)
    assert [each.file for each in found] == [shelf.segment.found.file]
    assert has_refused
    assert not (shelf.directory / second.file).exists()


def test_data_is_on_disk_before_its_name_and_the_name_before_the_end(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("write", "fsync", "rename"):
        real = getattr(os, name)

        def called(*args: Any, real: Any = real, name: str = name, **keywords: Any) -> Any:
            is_directory = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            calls.append("fsync directory" if is_directory else name)
            return real(*args, **keywords)

        monkeypatch.setattr(os, name, called)
    shelf.files.write(found_of(path_of(seed=2)), payload_of(found_of(path_of(seed=2))), 0)
    order = [name for name, _ in itertools.groupby(calls)]
    assert order == ["write", "fsync", "rename", "fsync directory"]


def test_a_segment_that_could_not_be_read_is_not_written(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("session_server.runner.segment_files.MAX_FILE_BYTES", 1000)
    before = os.listdir(shelf.directory)
    found = found_of(path_of(seed=2))
    with pytest.raises(OSError, match="a segment of"):
        shelf.files.write(found, payload_of(found), 0)
    assert os.listdir(shelf.directory) == before
    monkeypatch.setattr(segment_format, "MAX_FILE_BYTES", 1000)
    assert not shelf.is_read()


# A process that is killed

ENDLESS: Final = """
import sys
from pathlib import Path
from session_server.runner.segment_files import SegmentFiles
from tests.runner.kv_files import LAYOUT, found_of, path_of, payload_of

files = SegmentFiles(Path(sys.argv[1]), LAYOUT)
for seed in range(int(sys.argv[2]), 1 << 30):
    found = found_of(path_of(200, seed))
    files.write(found, payload_of(found, seed), 0)
    print(seed, flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_files(tmp_path: Path) -> None:
    told = set[int]()
    for number in range(at_depth(4, proof=40)):
        begin = number * 1000
        command = [sys.executable, "-c", ENDLESS, str(tmp_path), str(begin)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
            assert process.stdout is not None
            for line in itertools.islice(process.stdout, number + 1):
                told.add(int(line))
            process.kill()
            told |= {int(line) for line in process.stdout if line.endswith("\n")}
        files = SegmentFiles(tmp_path, LAYOUT)
        listed = {name for name, _ in files.listing(1000)}
        assert set(os.listdir(tmp_path)) == {file_name(name) for name in listed} | {REFUSED, OWNER}
        # One may be whole of which nothing was told.
        seeds = {seed: found_of(path_of(200, seed)) for seed in told | {s + 1 for s in told}}
        names = {found.file.file_id: seed for seed, found in seeds.items()}
        assert {names[name] for name in listed} >= told
        for name in listed:
            payload = files.read(seeds[names[name]])
            wrote = payload_of(seeds[names[name]], names[name])
            assert all(map(np.array_equal, payload[FULL], wrote[FULL]))
    assert not os.listdir(tmp_path / REFUSED)
