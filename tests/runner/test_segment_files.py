"""Files of KV: what was written is read, and a directory in which there is more than ours."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cache.tiers.segment import chain_after
from cache.tiers.segment_tree import SEGMENT_BYTES
from cache.types import Namespace
from session_server.core.tier_orders import FileKey, FoundFile
from session_server.engine.config import TierPolicy
from session_server.runner.kv_directory import remove_left
from session_server.runner.segment_files import SegmentFiles
from session_server.runner.segment_format import FileRefused
from tests.runner.kv_files import (
    LAYOUT,
    PAGE_SIZE,
    REFUSED,
    STATE,
    WINDOW,
    FailingDisk,
    Shelf,
    found_of,
    key_of,
    open_descriptors,
    path_of,
    same,
    written,
)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "kv")


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_was_written_is_found_and_read(shelf: Shelf) -> None:
    found, has_refused = shelf.files.find(shelf.segment.found.file, shelf.tokens)
    assert len(found) == 1
    assert not has_refused
    assert same(found[0], shelf.segment.found)
    payload = shelf.files.read(found[0])
    for pool, arrays in shelf.segment.payload.items():
        assert all(map(np.array_equal, payload[pool], arrays))
    assert SegmentFiles(shelf.directory, LAYOUT).read(found[0]).keys() == LAYOUT.pools.keys()


def test_a_file_stays_where_it_was_not_the_fault_of_the_file(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    files, found = shelf.files, shelf.segment.found
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            files.find(found.file, shelf.tokens)
        with pytest.raises(OSError, match="Too many open files"):
            files.read(found)
    assert files.read(found).keys() == LAYOUT.pools.keys()


def test_a_file_that_cannot_be_removed_is_told_of_once(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refuse)
    shelf.files.remove([shelf.segment.found.file.file_id] * 3)
    assert caplog.text.count("cannot be removed") == 1


def test_the_library_of_the_format_opens_it_and_reads_the_same(shelf: Shelf) -> None:
    tensors = load_file(shelf.path)
    assert np.array_equal(tensors.pop("tokens"), shelf.tokens)
    for pool, arrays in shelf.segment.payload.items():
        for index, array in enumerate(arrays):
            assert np.array_equal(tensors.pop(f"{pool}/{index}"), array)
    assert not tensors


def test_a_pool_of_which_a_segment_has_no_page_is_written_and_read(tmp_path: Path) -> None:
    files, tokens = SegmentFiles(tmp_path, LAYOUT), path_of()
    found = found_of(tokens)
    found = FoundFile(found.file, tokens, {**found.spans, WINDOW: (5, 5), STATE: (0, 0)})
    one = written(files, tmp_path, found)
    assert files.read(found)[WINDOW][0].shape == (3, 0, 4)
    assert load_file(tmp_path / one.file)["state/1"].shape == (0, 10)


def test_a_path_is_found_through_its_segments_and_where_it_leaves_one(tmp_path: Path) -> None:
    files, tokens = SegmentFiles(tmp_path, LAYOUT), path_of(8)
    first = written(files, tmp_path, found_of(tokens[:20])).found
    second = written(files, tmp_path, found_of(tokens, 20)).found
    other = np.concatenate([tokens[:12], path_of(3, seed=9)])
    third = written(files, tmp_path, found_of(other, 12)).found
    key = key_of(tokens, 0)
    assert [f.file for f in files.find(key, tokens)[0]] == [first.file, second.file]
    assert [f.file for f in files.find(key, other)[0]] == [first.file, third.file]
    assert [f.file for f in files.find(key, tokens[:22])[0]] == [first.file]
    assert [f.file for f in files.find(key, tokens[:3])[0]] == []
    assert files.find(second.file, tokens)[0][0].file == second.file


def test_what_a_file_has_beside_tokens_and_pages_is_what_a_segment_counts(shelf: Shelf) -> None:
    pages = sum(array.nbytes for arrays in shelf.segment.payload.values() for array in arrays)
    assert len(shelf.segment.raw) <= SEGMENT_BYTES + shelf.tokens.nbytes + pages
    # The largest that a server writes: a checksum for each of its MiB, of the longest numbers.
    found, blocks = shelf.segment.found, TierPolicy().segment_bytes >> 20
    checks: dict[str, tuple[int, ...]] = {
        f"{pool}/{index}": (2**32 - 1,) * (blocks // 5 + 1)
        for pool, each in LAYOUT.pools.items()
        for index in range(len(each.shapes))
    }
    header = LAYOUT.header(found.file, 1 << 17, found.spans, checks | {"tokens": (2**32 - 1,)})
    assert len(header.text) <= SEGMENT_BYTES


def test_only_their_owner_may_look_whatever_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        shelf = Shelf(tmp_path / "kv")
    finally:
        os.umask(before)
    assert stat.S_IMODE(shelf.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((shelf.directory / REFUSED).stat().st_mode) == 0o700
    assert stat.S_IMODE(shelf.path.stat().st_mode) == 0o600
    shelf.directory.chmod(0o755)
    SegmentFiles(shelf.directory, LAYOUT)
    assert stat.S_IMODE(shelf.directory.stat().st_mode) == 0o700


# The directory


def test_a_directory_that_is_a_link_is_not_opened(tmp_path: Path) -> None:
    outside, kv = tmp_path / "outside", tmp_path / "kv"
    outside.mkdir()
    kv.symlink_to(outside)
    num_open = open_descriptors()
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        SegmentFiles(kv, LAYOUT)
    assert open_descriptors() == num_open


def test_what_is_put_aside_goes_through_no_link(tmp_path: Path) -> None:
    outside, kv = tmp_path / "outside", tmp_path / "kv"
    outside.mkdir()
    kv.mkdir()
    (kv / REFUSED).symlink_to(outside)
    files = SegmentFiles(kv, LAYOUT)
    one = written(files, kv, found_of(path_of()))
    (kv / one.file).write_bytes(b"spoiled")
    with pytest.raises(FileRefused):
        files.read(one.found)
    assert [path.name for path in (kv / REFUSED).iterdir()] == [one.file]
    assert not list(outside.iterdir())


def test_a_directory_that_is_a_file_or_of_a_dead_disk_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    num_open = open_descriptors()
    with pytest.raises(FileExistsError):
        SegmentFiles(tmp_path / "file", LAYOUT)
    disk = FailingDisk(monkeypatch, ("open", "fchmod", "mkdir"))
    for at in itertools.count():
        disk.begin(at)
        try:
            SegmentFiles(tmp_path / "kv", LAYOUT)
        except OSError:
            assert open_descriptors() == num_open
        if not disk.has_struck:
            break
    assert at >= 5


def test_what_is_put_aside_does_not_leave_through_a_link_made_later(
    shelf: Shelf, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (shelf.directory / REFUSED).rename(tmp_path / "moved")
    (shelf.directory / REFUSED).symlink_to(outside)
    shelf.path.write_bytes(b"")
    assert shelf.files.find(shelf.segment.found.file, shelf.tokens) == ([], True)
    assert os.listdir(outside) == []


def test_what_is_not_ours_is_left_alone_and_reported(
    shelf: Shelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    none = "0" * 72
    kept = ["notes.txt", "new-notes", f"{'0' * 71}.safetensors", f"{'0' * 73}.safetensors",
            f"{'A' * 72}.safetensors", f"{chr(0x660) * 72}.safetensors", f"{none}.safetensors.bak",
            f"{none}.safetensors\n"]  # fmt: skip
    for name in kept:
        (shelf.directory / name).write_text(name)
    (shelf.directory / "new-0123456789abcdef").write_text("half of a file")
    (shelf.directory / f"{'1' * 72}.safetensors").symlink_to(outside)
    (shelf.directory / f"{'2' * 72}.safetensors").mkdir()
    expected = [(shelf.segment.found.file.file_id, len(shelf.segment.raw))]
    assert shelf.files.listing(1000) == expected
    assert "have 10 others" in caplog.text
    assert not (shelf.directory / "new-0123456789abcdef").exists()
    (shelf.directory / REFUSED / f"{none}.safetensors").write_text("of a session that is gone")
    shelf.files.remove_all()
    assert not os.listdir(shelf.directory / REFUSED)
    left = set(os.listdir(shelf.directory))
    assert left == {*kept, REFUSED, f"{'2' * 72}.safetensors"}
    assert outside.read_text() == "precious"


def test_files_of_another_layout_are_gone_before_any_is_added(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    (shelf.directory / REFUSED / shelf.path.name).write_text("put aside")
    ids = [file_id for file_id, _ in SegmentFiles(shelf.directory, LAYOUT).listing(1000)]
    assert ids == [shelf.segment.found.file.file_id]
    assert not caplog.text
    caplog.set_level("INFO")
    others = SegmentFiles(shelf.directory, replace(LAYOUT, identity="another"))
    assert shelf.path.exists()  # a start does not wait for it
    assert others.listing(1000) == []
    assert "removed 2 files of KV" in caplog.text
    assert not list(shelf.directory.rglob("*.safetensors"))


def test_a_removal_that_a_crash_interrupts_is_done_by_the_next_server(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", crash)
        with pytest.raises(KeyboardInterrupt):
            remove_left(shelf.directory)
    assert shelf.path.exists()
    assert SegmentFiles(shelf.directory, LAYOUT).listing(1000) == []
    assert not shelf.path.exists()


def test_what_servers_have_left_is_removed_and_nothing_else(shelf: Shelf, tmp_path: Path) -> None:
    assert remove_left(tmp_path / "never") == 0
    assert not (tmp_path / "never").exists()
    for name in (f"{REFUSED}/{shelf.path.name}", "new-0123456789abcdef", "notes.txt"):
        (shelf.directory / name).write_text(name)
    assert remove_left(shelf.directory) == 3
    assert sorted(os.listdir(shelf.directory)) == ["notes.txt", REFUSED]
    assert remove_left(shelf.directory) == 0


def test_a_file_that_goes_while_files_are_listed_is_not_listed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = shelf.files._entries()
    monkeypatch.setattr(shelf.files, "_entries", lambda: entries)
    shelf.path.unlink()
    assert shelf.files.listing(1000) == []


def test_files_are_listed_by_their_last_use(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path, LAYOUT)
    names = [
        written(files, tmp_path, found_of(path_of(seed=seed))).found.file.file_id
        for seed in range(6)
    ]
    uses_ns = itertools.count(10_000, 1000)
    for order in (names, names[::-1], names[3:] + names[:3]):
        files.touch(order, next(uses_ns))
        assert [name for name, _ in files.listing(1000)] == order[::-1]
    files.touch(names[2:3], next(uses_ns))
    assert [name for name, _ in files.listing(1000)][-1] == names[2]
    files.touch([b"\0" * 36], next(uses_ns))
    files.remove([names[0], b"\0" * 36, names[1]])
    assert {name for name, _ in files.listing(1000)} == set(names[2:])


def test_a_chain_covers_all_that_lies_before() -> None:
    """A name is that of one path alone: every token, its order and its place count."""
    tokens = path_of(3)
    chains = {key_of(tokens, 8).name}
    for at in range(len(tokens)):
        other = tokens.copy()
        other[at] ^= 1
        chains.add(key_of(other, 8).name)
    chains.add(chain_after(b"", tokens, PAGE_SIZE))
    chains.add(FileKey(b"", Namespace("alic", "emodel"), b"", 0).name)
    chains.add(key_of(tokens, 8, Namespace("alic", "emodel")).name)
    assert len(chains) == len(tokens) + 4


def test_what_could_not_be_removed_is_removed_before_it_counts_as_erased(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        shelf.files.remove([shelf.segment.found.file.file_id])
        assert not shelf.files.erase()
    assert shelf.path.exists()
    assert shelf.files.erase()
    assert not shelf.path.exists()


def test_one_that_could_not_be_removed_and_was_written_again_stays(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        shelf.files.remove([shelf.segment.found.file.file_id])
    written(shelf.files, shelf.directory, shelf.segment.found)
    assert shelf.files.erase()
    assert shelf.path.exists()


def test_all_that_could_not_be_removed_is_removed_before_it_counts_as_erased(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(OSError, match="Input/output"):
            shelf.files.remove_all()
        assert not shelf.files.erase()
    assert shelf.files.erase()
    assert not shelf.path.exists()


def test_what_was_put_aside_is_erased_with_what_was_deleted(shelf: Shelf) -> None:
    os.truncate(shelf.path, shelf.path.stat().st_size - 1)
    assert shelf.files.find(shelf.segment.found.file, shelf.tokens) == ([], True)
    refused = shelf.directory / REFUSED
    assert len(list(refused.iterdir())) == 1
    assert shelf.files.erase()
    assert not list(refused.iterdir())


def test_what_somebody_has_put_beside_refused_files_keeps_nothing_from_being_erased(
    shelf: Shelf,
) -> None:
    refused = shelf.directory / REFUSED
    (refused / "to look at").mkdir()
    (refused / "notes").write_text("mine")
    os.truncate(shelf.path, shelf.path.stat().st_size - 1)
    assert shelf.files.find(shelf.segment.found.file, shelf.tokens) == ([], True)
    assert len(list(refused.iterdir())) == 3
    assert shelf.files.erase()
    assert sorted(each.name for each in refused.iterdir()) == ["notes", "to look at"]


def test_a_directory_is_synced_once_for_all_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SegmentFiles(tmp_path, LAYOUT)
    ids = [written(files, tmp_path, found_of(path_of(seed=n))).found.file.file_id for n in (1, 2)]
    synced: list[tuple[Path, int]] = []

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path, len(list(tmp_path.glob("*.safetensors")))))

    monkeypatch.setattr(os, "fsync", sync)
    files.remove(ids)
    assert not synced
    assert files.erase()
    assert synced == [(tmp_path / REFUSED, 0), (tmp_path, 0)]
    monkeypatch.setattr(os, "fsync", refuse)
    assert not files.erase()
