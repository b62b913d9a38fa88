"""A directory of KV that several servers write: nothing wrong is used, its bytes are kept, what is
deleted goes, and what others need stays."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from session_server.core.tier_orders import DroppedPath, FoundFile
from session_server.runner import own_files, shared_deletion, shared_files
from session_server.runner.kv_directory import RESERVE_DIVISOR
from session_server.runner.segment_files import FileGone, OtherFile, file_name
from session_server.runner.segment_format import FileRefused, Layout
from session_server.runner.shared_directory import UNUSED_S, SharedDirectory
from session_server.runner.shared_files import SharedFiles
from session_server.runner.shared_writers import LOOKED_AT
from tests.runner.kv_files import (
    LAYOUT,
    NAMESPACE,
    PAGE_SIZE,
    REFUSED,
    found_of,
    key_of,
    path_of,
    payload_of,
    with_header,
    with_text,
)
from tests.runner.kv_files import Written as WrittenFile

KEY = b"k" * 32
SHARED = replace(LAYOUT, key=KEY)
PLENTY = 1 << 24


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def server(directory: Path, max_bytes: int = PLENTY, layout: Layout = SHARED) -> SharedFiles:
    return SharedFiles(directory, layout, max_bytes)


def walk(directory: SharedDirectory) -> None:
    """Look at all of it, however many slices that takes."""
    directory.tick()
    while directory._walk is not None:
        directory.tick()


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*/*.safetensors"))


def write(files: SharedFiles, found: FoundFile, used_ns: int = 0) -> WrittenFile:
    payload = payload_of(found)
    files.write(found, payload, used_ns)
    name = file_name(found.file.file_id)
    (path,) = (Path(f"/proc/self/fd/{files._directory}") / name,)
    return WrittenFile(found, payload, path.read_bytes())


def drop(files: SharedFiles, tokens: np.ndarray, num_kept: int = 0) -> None:
    drop_all(files, [DroppedPath(NAMESPACE, tokens, num_kept)])


def drop_all(files: SharedFiles, paths: list[DroppedPath]) -> None:
    is_done = files.drop(paths)
    while not is_done:
        is_done = files.drop([])
    assert files.erase()


def size_of_one(directory: Path) -> int:
    write(server(directory / "sized"), found_of(path_of()))
    (path,) = files_in(directory / "sized")
    return path.stat().st_size


# What is used


def test_what_one_server_writes_another_finds_and_reads(tmp_path: Path) -> None:
    tokens = path_of()
    one = write(server(tmp_path), found_of(tokens))
    other = server(tmp_path)
    (found,), has_refused = other.find(key_of(tokens, 0), tokens)
    assert not has_refused
    payload = other.read(found)
    for pool, arrays in one.payload.items():
        assert all(map(np.array_equal, payload[pool], arrays))


def test_nobody_without_the_key_has_a_file_used_and_none_is_used_that_was_changed(
    tmp_path: Path,
) -> None:
    tokens = path_of()
    reader = server(tmp_path)
    one = write(reader, found_of(tokens))
    (path,) = files_in(tmp_path)
    forged = dict(one.header["__metadata__"])
    of_other_key = server(tmp_path / "x", layout=replace(LAYOUT, key=b"other" * 8))
    of_none = WrittenFile(one.found, one.payload, write(of_other_key, one.found).raw)
    unsigned = {**one.header, "__metadata__": {**forged, "mac": "0" * len(forged["mac"])}}
    spoiled = [
        with_header(one, unsigned, signed=False),
        with_header(one, one.header),  # with a checksum, which anybody can compute
        of_none.raw,
        with_text(one, b"{}"),
        one.raw[:-1],
    ]
    for at in range(0, len(one.raw), 7):
        raw = bytearray(one.raw)
        raw[at] ^= 1
        spoiled.append(bytes(raw))
    for raw in spoiled:
        path.write_bytes(raw)
        with pytest.raises(FileRefused):
            reader.read(one.found)
        assert not path.exists()
    path.write_bytes(one.raw)
    reader.read(one.found)


def test_a_file_that_another_server_has_written_anew_is_not_put_aside(tmp_path: Path) -> None:
    tokens, files, others = path_of(), server(tmp_path), server(tmp_path)
    before = write(files, found_of(tokens[: 3 * PAGE_SIZE]))
    after = write(others, found_of(tokens))
    with pytest.raises(OtherFile):
        files.read(before.found)
    others.read(after.found)
    (path,) = files_in(tmp_path)
    path.unlink()
    with pytest.raises(FileGone):
        others.read(after.found)


def test_another_layout_or_store_has_files_of_its_own_that_are_left_alone(tmp_path: Path) -> None:
    layouts = (SHARED, replace(SHARED, identity="another"), replace(LAYOUT, key=b"other" * 8))
    servers = [server(tmp_path, layout=layout) for layout in layouts]
    for each in servers:
        write(each, found_of(path_of()))
        each.room()
    assert len(files_in(tmp_path)) == len(layouts)
    servers[0].remove_all()
    drop_all(servers[0], [])
    assert len(files_in(tmp_path)) == len(layouts) - 1


# What may be wrong


@pytest.mark.parametrize("max_written", [3, 100])
def test_all_that_a_server_has_written_goes_in_slices_and_is_used_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_written: int
) -> None:
    monkeypatch.setattr(own_files, "MAX_WRITTEN", max_written)
    monkeypatch.setattr(shared_files, "SLICE_S", 0.0)
    before, other = server(tmp_path), server(tmp_path)
    theirs = path_of(seed=100)
    write(before, found_of(theirs))
    time.sleep(0.02)  # the clock of the files has ticks
    files = server(tmp_path)
    paths = [path_of(seed=seed) for seed in range(12)]
    all_found = [write(files, found_of(tokens)).found for tokens in paths]
    files.remove_all()
    for tokens, found in zip(paths, all_found, strict=True):
        assert files.find(key_of(tokens, 0), tokens) == ([], False)
        with pytest.raises(FileGone):
            files.read(found)
    num_left = len(files_in(tmp_path))
    assert num_left == 13, "all are there, and none is used"
    if max_written > len(paths):
        write(files, all_found[0])
        assert files.find(key_of(paths[0], 0), paths[0])[0], "it was written anew"
    num_slices = 1
    while not files.drop([]):
        assert num_left - len(files_in(tmp_path)) <= 1
        num_left, num_slices = len(files_in(tmp_path)), num_slices + 1
    assert num_slices >= 12
    assert len(files_in(tmp_path)) == 1 + (max_written > len(paths))
    assert other.find(key_of(theirs, 0), theirs)[0]
    write(files, all_found[1])
    assert files.find(key_of(paths[1], 0), paths[1])[0]


@pytest.mark.parametrize("max_written", [3, 100])
def test_what_cannot_be_removed_now_is_not_used_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_written: int
) -> None:
    monkeypatch.setattr(own_files, "MAX_WRITTEN", max_written)
    files = server(tmp_path)
    paths = [path_of(seed=seed) for seed in range(6)]
    for tokens in paths:
        write(files, found_of(tokens))
    files.remove_all()
    unlink, stuck = os.unlink, file_name(found_of(paths[5]).file.file_id)

    def fail(name: str, *, dir_fd: int) -> None:
        if name == stuck:
            raise OSError(errno.EIO, "dead")
        unlink(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        with pytest.raises(OSError, match="dead"):
            drop_all(files, [])
        files.room()
    assert [path.name for path in files_in(tmp_path)] == [stuck]
    assert files.find(key_of(paths[5], 0), paths[5]) == ([], False)
    files.room()
    assert not files_in(tmp_path)


def test_what_cannot_be_removed_keeps_nothing_that_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tokens = server(tmp_path), path_of()
    write(files, found_of(path_of(seed=1)))
    files.remove_all()
    write(files, found_of(tokens))

    def fail(_: str) -> None:
        raise OSError(errno.EIO, "dead")

    monkeypatch.setattr(files, "_unlink_now", fail, raising=True)
    with pytest.raises(OSError, match="dead"):
        drop(files, tokens)
    monkeypatch.undo()
    drop_all(files, [])
    assert not files_in(tmp_path)


# Deletion


def test_what_is_deleted_goes_whoever_has_written_it_and_what_others_follow_stays(
    tmp_path: Path,
) -> None:
    one, other = server(tmp_path), server(tmp_path)
    common = path_of(4)
    ours = np.concatenate([common, path_of(4, seed=1)])
    theirs = np.concatenate([common, path_of(4, seed=2)])
    write(one, found_of(common))
    write(other, found_of(ours, 16))
    write(one, found_of(theirs, 16))
    drop(one, ours)
    assert len(files_in(tmp_path)) == 2
    assert len(one.find(key_of(theirs, 0), theirs)[0]) == 2
    drop(other, theirs, num_kept=20)
    assert len(files_in(tmp_path)) == 2, "what is kept of it begins before its last file ends"
    drop(other, theirs)
    assert not files_in(tmp_path)


def test_a_gap_hides_no_file_from_being_deleted(tmp_path: Path) -> None:
    files, tokens = server(tmp_path), path_of(6)
    for start in (0, 8, 16):
        write(files, found_of(tokens[: start + 8], start))
    files.remove([key_of(tokens, 8).file_id])
    drop(files, tokens)
    assert not files_in(tmp_path)


def test_of_two_that_are_deleted_at_once_the_last_look_takes_what_both_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = server(tmp_path), server(tmp_path)
    common = path_of(4)
    both = [np.concatenate([common, path_of(4, seed=seed)]) for seed in (1, 2)]
    write(one, found_of(common))
    for tokens in both:
        write(one, found_of(tokens, 16))
    barrier = threading.Barrier(2, timeout=10)
    names = shared_deletion._names

    def at_once(directory: int) -> list[bytes]:
        found = list(names(directory))
        if len(found) == 3:
            barrier.wait()  # both have seen what the other one has
        return found

    monkeypatch.setattr(shared_deletion, "_names", at_once)
    threads = [
        threading.Thread(target=drop, args=each) for each in zip((one, other), both, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not files_in(tmp_path)


def test_many_that_are_deleted_share_two_looks_that_are_done_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, common = server(tmp_path), path_of(4)
    write(files, found_of(common))
    paths = [np.concatenate([common, path_of(2, seed=seed)]) for seed in range(40)]
    for tokens in paths:
        write(files, found_of(tokens, 16))
    looks, names = list[int](), shared_deletion._names

    def counted(directory: int) -> Iterator[bytes]:
        looks.append(directory)
        yield from names(directory)

    monkeypatch.setattr(shared_deletion, "_names", counted)
    monkeypatch.setattr(shared_files, "SLICE_S", 0.0)
    kept = paths.pop()
    assert not files.drop([DroppedPath(NAMESPACE, tokens, 0) for tokens in paths])
    num_slices, num_left = 1, len(files_in(tmp_path))
    while not files.drop([]):
        num_slices += 1
        left = len(files_in(tmp_path))
        assert num_left - left <= 1
        num_left = left
    assert num_slices > 3 * len(paths)
    assert len(looks) == 2
    assert len(files.find(key_of(kept, 0), kept)[0]) == 2
    assert len(files_in(tmp_path)) == 2


def test_of_a_history_that_was_cut_and_then_deleted_nothing_stays(tmp_path: Path) -> None:
    files, tokens = server(tmp_path), path_of(6)
    for start in (0, 8, 16):
        write(files, found_of(tokens[: start + 8], start))
    drop_all(files, [DroppedPath(NAMESPACE, tokens, 8), DroppedPath(NAMESPACE, tokens[:8], 0)])
    assert not files_in(tmp_path)
    write(files, found_of(tokens[:8]))
    drop_all(files, [DroppedPath(NAMESPACE, tokens[:8], 100)])
    assert len(files_in(tmp_path)) == 1, "all of it is kept"


def test_a_directory_that_cannot_be_read_keeps_nothing_of_what_was_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tokens = server(tmp_path), path_of()
    write(files, found_of(tokens))

    def fail(_: int) -> Iterator[bytes]:
        raise OSError(errno.EIO, "dead")

    with monkeypatch.context() as patch:
        patch.setattr(shared_deletion, "_names", fail)
        for _ in range(3):
            with pytest.raises(OSError, match="dead"):
                drop(files, tokens)
    assert files.drop([])
    drop(files, tokens)
    assert not files_in(tmp_path)


# Bytes


def test_the_directory_keeps_its_bytes_with_two_writers_and_those_used_last(
    tmp_path: Path,
) -> None:
    size = size_of_one(tmp_path)
    directory, most = tmp_path / "kv", 8 * size
    servers = [server(directory, most) for _ in range(2)]
    for number in range(60):
        write(servers[number % 2], found_of(path_of(seed=number)), number)
        assert sum(path.stat().st_size for path in files_in(directory)) <= most
        if number % 7 == 0:
            servers[number % 2].room()
    assert len(files_in(directory)) >= 5, "and no more goes than has to"
    left = {path.name for path in files_in(directory)}
    newest = found_of(path_of(seed=59))
    assert file_name(newest.file.file_id) in left


def test_the_bytes_are_kept_by_writers_at_the_same_time_of_whom_some_are_killed(
    tmp_path: Path,
) -> None:
    size = size_of_one(tmp_path)
    directory, most, largest, codes = tmp_path / "kv", 12 * size, 0, list[int | None]()

    def live(first: int) -> None:
        files = server(directory, most)
        for number in range(first, first + 25):
            if number % 6 == 5:
                files = server(directory, most)  # one that was killed says nothing more
            found = found_of(path_of(seed=number))
            try:
                files.write(found, payload_of(found), number)
            except OSError as error:  # what three are writing is counted for all of them
                codes.append(error.errno)

    writers = [threading.Thread(target=live, args=(1000 * n,)) for n in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        held = 0
        for path in directory.glob("*/*"):
            if path.is_file():
                try:
                    held += path.stat().st_size
                except FileNotFoundError:
                    continue
        largest = max(largest, held)
    assert most // 4 < largest <= most
    assert len(codes) < 25
    assert set(codes) <= {errno.ENOSPC}


def test_a_file_that_somebody_has_used_since_is_not_the_oldest(tmp_path: Path) -> None:
    size = size_of_one(tmp_path)
    directory = tmp_path / "kv"
    one, other = (server(directory, 4 * size + size // 2) for _ in range(2))
    names = [
        write(one, found_of(path_of(seed=seed)), 1000 * seed).found.file.file_id
        for seed in range(4)
    ]
    one.room()  # it knows them by now
    other.touch(names[:1], 10_000_000)
    write(one, found_of(path_of(seed=9)), 20_000_000)
    left = {path.name for path in files_in(directory)}
    assert file_name(names[0]) in left
    assert file_name(names[1]) not in left


def test_what_dead_servers_have_left_is_removed(tmp_path: Path) -> None:
    gone = server(tmp_path, layout=replace(SHARED, identity="of last year"))
    write(gone, found_of(path_of()))
    clock = Clock()
    alive = SharedDirectory(tmp_path, SHARED.name, PLENTY, clock=clock)
    own = os.open(f"/proc/self/fd/{alive.open()}", os.O_RDONLY)
    (tmp_path / SHARED.name / ("new-" + "0" * 16)).write_bytes(b"half of a file")
    alive.tick()
    assert len(files_in(tmp_path)) == 1, "it may be in use"
    for writer in tmp_path.glob("writer-*"):
        before_s = writer.stat().st_mtime - 2 * UNUSED_S
        os.utime(writer, (before_s, before_s))
    clock.now_s += 100
    alive.tick()
    assert not files_in(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [SHARED.name]
    assert len(list(tmp_path.glob("writer-*"))) == 1
    os.close(own)
    # Whoever was stopped for so long goes on.
    gone._shared._heartbeat_due_s = 0.0
    gone.room()
    write(gone, found_of(path_of()))
    assert len(files_in(tmp_path)) == 1


def test_a_walk_is_done_in_slices(tmp_path: Path) -> None:
    files = server(tmp_path)
    for seed in range(12):
        write(files, found_of(path_of(seed=seed)))
    times = itertools.count()
    directory = SharedDirectory(tmp_path, SHARED.name, PLENTY, clock=lambda: next(times) * 0.008)
    num_ticks = 0
    while directory._walked is None:
        directory.tick()
        num_ticks += 1
    assert num_ticks > 3
    assert directory._walked.num_bytes == sum(path.stat().st_size for path in files_in(tmp_path))


def test_a_disk_that_is_nearly_full_has_files_go_too(tmp_path: Path) -> None:
    size = size_of_one(tmp_path)
    files = server(tmp_path / "kv")
    for seed in range(4):
        write(files, found_of(path_of(seed=seed)), seed)
    blocks = RESERVE_DIVISOR * size

    def statvfs(_: int) -> os.statvfs_result:
        free = blocks - sum(path.stat().st_size for path in files_in(tmp_path / "kv"))
        return os.statvfs_result((1, 1, blocks, free, free, 0, 0, 0, 0, 255))

    files._shared._statvfs = statvfs
    for seed in range(4, 20):
        write(files, found_of(path_of(seed=seed)), seed)
    held = sum(path.stat().st_size for path in files_in(tmp_path / "kv"))
    assert held <= blocks - size


def test_a_server_puts_aside_what_is_wrong_and_erases_it_with_what_is_deleted(
    tmp_path: Path,
) -> None:
    files, tokens = server(tmp_path), path_of()
    write(files, found_of(tokens))
    (path,) = files_in(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert files.find(key_of(tokens, 0), tokens) == ([], True)
    assert len(list((path.parent / REFUSED).iterdir())) == 1
    drop(files, tokens)
    assert not list((path.parent / REFUSED).iterdir())


# Servers that were stopped


def taken_for_dead(directory: Path, *names: str) -> None:
    """Have the files of some servers, or of all, be those of servers that say nothing more."""
    for writer in directory.glob("writer-*"):
        if not names or writer.name in names:
            writer.unlink()


def test_a_server_that_comes_back_has_no_file_go_for_what_it_wrote_before(tmp_path: Path) -> None:
    size = size_of_one(tmp_path)
    directory = tmp_path / "kv"
    stopped, other = (server(directory, 8 * size) for _ in range(2))
    for seed in range(5):
        write(stopped, found_of(path_of(seed=seed)), seed)
    taken_for_dead(directory)
    other.room()
    write(other, found_of(path_of(seed=5)), 5)
    write(stopped, found_of(path_of(seed=6)), 6)
    write(other, found_of(path_of(seed=7)), 7)
    assert len(files_in(directory)) == 8


def test_a_server_that_comes_back_counts_what_others_wrote_that_are_gone(tmp_path: Path) -> None:
    size = size_of_one(tmp_path)
    directory = tmp_path / "kv"
    stopped, other = (server(directory, 8 * size) for _ in range(2))
    write(stopped, found_of(path_of(seed=0)))
    stopped.room()
    for seed in range(1, 8):
        write(other, found_of(path_of(seed=seed)), seed)
    taken_for_dead(directory)
    for seed in range(8, 12):
        write(stopped, found_of(path_of(seed=seed)), seed)
        assert sum(path.stat().st_size for path in files_in(directory)) <= 8 * size


def test_what_was_being_written_when_a_server_was_taken_for_dead_is_counted(tmp_path: Path) -> None:
    directory = SharedDirectory(tmp_path, SHARED.name, PLENTY)
    os.close(directory.open())
    directory.reserve(1000)
    taken_for_dead(tmp_path)
    other = SharedDirectory(tmp_path, SHARED.name, PLENTY)
    walk(other)
    directory.end_write()
    assert other._excess(0) == 1000 - PLENTY


def test_a_server_whose_directory_was_removed_and_made_anew_goes_on_in_the_new_one(
    tmp_path: Path,
) -> None:
    stopped, tokens = server(tmp_path), path_of()
    write(stopped, found_of(tokens))
    shutil.rmtree(tmp_path / SHARED.name)
    taken_for_dead(tmp_path)
    other = server(tmp_path)
    write(other, found_of(tokens))
    drop(stopped, tokens)
    assert not files_in(tmp_path), "what is deleted is deleted where others look for it"
    write(stopped, found_of(tokens))
    assert len(files_in(tmp_path)) == 1
    shutil.rmtree(tmp_path / SHARED.name)
    write(stopped, found_of(tokens))
    assert len(files_in(tmp_path)) == 1


# Many servers


def test_a_write_reads_what_a_few_servers_say_however_many_there_are(tmp_path: Path) -> None:
    files = server(tmp_path)
    opened, number = list[str](), 5 * LOOKED_AT
    for seed in range(number):
        name = f"writer-{SHARED.name}-{seed:016x}"
        (tmp_path / name).write_bytes(b"%020d %020d\n" % (seed, seed))
    walk(files._shared)
    assert len(files._shared._writers._known) == number + 1
    os_open = os.open

    def counted(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).startswith("writer-"):
            opened.append(path)
        return os_open(path, flags, mode, dir_fd=dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", counted)
        write(files, found_of(path_of()))
        # Its own file twice, and what others say once for the write and once behind it.
        assert len(opened) <= 2 * LOOKED_AT + 3
        for _ in range(5):
            files.room()
    assert len({*opened}) == number + 1, "each has its turn"


def test_what_a_new_server_writes_is_counted_by_others_before_their_next_walk(
    tmp_path: Path,
) -> None:
    first = SharedDirectory(tmp_path, SHARED.name, PLENTY)
    walk(first)
    second = SharedDirectory(tmp_path, SHARED.name, PLENTY)
    os.close(second.open())
    second.reserve(500)
    assert first._excess(0) == 500 - PLENTY
    second.end_write()
    second.reserve(200)
    assert first._excess(0) == 700 - PLENTY


# What only has a name


def _file(path: Path) -> None:
    path.write_bytes(b"not ours")


def _directory(path: Path) -> None:
    path.mkdir()


def _full_directory(path: Path) -> None:
    path.mkdir()
    (path / "something").write_bytes(b"not ours")


def _link(path: Path) -> None:
    target = path.parent.parent / f"target-{len(list(path.parent.parent.iterdir()))}"
    target.mkdir()
    (target / "kept").write_bytes(b"not ours")
    path.symlink_to(target)


def _loose_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


ODD = (_file, _directory, _full_directory, _link, _loose_link, _pipe)
SEGMENT_NAME = file_name(found_of(path_of(seed=3)).file.file_id)
NAMES = {
    "its layout": SHARED.name,
    "another layout": "0" * 32,
    "another server": f"writer-{SHARED.name}-{0:016x}",
    "what was put aside": f"{SHARED.name}/{REFUSED}",
    "a segment": f"{SHARED.name}/{SEGMENT_NAME}",
    "an unfinished file": f"{SHARED.name}/new-{0:016x}",
}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("what", NAMES)
def test_what_only_has_a_name_keeps_nobody_from_anything(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], None],
    what: str,
    *,
    is_old: bool,
) -> None:
    size = size_of_one(tmp_path)
    directory = tmp_path / "kv"
    odd = directory / NAMES[what]
    odd.parent.mkdir(parents=True)
    make(odd)
    if is_old:
        before_s = odd.lstat().st_mtime - 2 * UNUSED_S
        os.utime(odd, (before_s, before_s), follow_symlinks=False)
    files, other = server(directory, 4 * size), server(directory, 4 * size)
    for seed in range(12):
        write((files, other)[seed % 2], found_of(path_of(seed=seed)), seed)
        if seed == 3:
            assert other.find(key_of(path_of(seed=3), 0), path_of(seed=3))[0]
        for each in (files, other):
            each.room()
    found = [path for path in directory.glob(f"{SHARED.name}/*.safetensors") if path.is_file()]
    assert 3 <= len(found) <= 4
    write(files, found_of(path_of(seed=3)), 20)
    (path,) = [path for path in found_paths(directory) if path.name == SEGMENT_NAME]
    path.write_bytes(b"spoiled")
    assert files.find(key_of(path_of(seed=3), 0), path_of(seed=3)) == ([], True)
    for seed in range(12):
        drop(files, path_of(seed=seed))
    assert not found_paths(directory)
    ours = [each for each in caplog.records if "is not used" not in each.getMessage()]
    assert len(ours) <= 2, "each server says it once"
    assert not list(tmp_path.glob("target-*/*safetensors"))
    assert len(list(tmp_path.glob("target-*/kept"))) == len(list(tmp_path.glob("target-*")))


def found_paths(directory: Path) -> list[Path]:
    return [path for path in files_in(directory) if path.is_file()]


def test_an_odd_name_does_not_keep_what_nobody_uses(tmp_path: Path) -> None:
    gone = server(tmp_path, layout=replace(SHARED, identity="of last year"))
    write(gone, found_of(path_of()))
    (own,) = tmp_path.glob("writer-*")
    own.unlink()
    own.mkdir()
    SharedDirectory(tmp_path, SHARED.name, PLENTY).tick()
    assert not files_in(tmp_path)
