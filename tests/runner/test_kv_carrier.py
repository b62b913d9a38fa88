"""The carrier answers every order once and raises nothing, whatever memory and disk do; what it has
promised to read stays until it was read.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache.pool.page_copy import PagedTensor
from cache.types import PoolName
from session_server.core.tier_orders import (
    CopyIn,
    CopyOut,
    FindFiles,
    Forget,
    FoundFile,
    ListFiles,
    MeasureRoom,
    ReadPart,
    Refusal,
    TierOrder,
    TierResult,
    TierThread,
    WriteFile,
)
from session_server.runner import kv_carrier
from session_server.runner.kv_carrier import KvCarrier
from session_server.runner.segment_files import SegmentFiles, file_name
from session_server.runner.segment_format import Layout, PoolLayout
from tests.runner.kv_files import FULL, PAGE_SIZE, WINDOW, key_of, path_of

NUM_PAGES = 32
PAGES = 5


class House:
    """Two pools, their carrier and its files."""

    def __init__(self, directory: Path) -> None:
        rng = np.random.default_rng(0)
        full = torch.from_numpy(rng.integers(0, 256, (2, NUM_PAGES, 8), np.uint8))
        window = torch.from_numpy(rng.integers(0, 256, (NUM_PAGES, 6), np.uint8))
        self.pools: dict[PoolName, tuple[torch.Tensor, int]] = {
            FULL: (full, 1),
            WINDOW: (window, 0),
        }
        tensors = {pool: [PagedTensor(*each)] for pool, each in self.pools.items()}
        layout = Layout(
            PAGE_SIZE,
            {
                pool: PoolLayout((each.shape_of(0),), each.page_axis, is_whole=pool == FULL)
                for pool, (each,) in tensors.items()
            },
            "model",
        )
        self.directory = directory
        self.free_bytes, self.disk_bytes = 1 << 30, 1 << 32
        self.files = SegmentFiles(directory, layout, statvfs=lambda _: self.statvfs())
        self.carrier = KvCarrier(tensors, self.files)
        self.tokens = path_of(PAGES)
        self.found = FoundFile(key_of(self.tokens, 0), self.tokens, {FULL: (0, 5), WINDOW: (3, 5)})

    def statvfs(self) -> os.statvfs_result:
        """What the disk says of itself: its root has more than others."""
        free, num = self.free_bytes, self.disk_bytes
        return os.statvfs_result((1, 1, num, free + 1000, free, 0, 0, 0, 0, 255))

    @property
    def file(self) -> Path:
        """Where the segment is written."""
        return self.directory / file_name(self.found.file.file_id)

    def do(self, order: TierOrder) -> TierResult:
        """Carry out an order that is answered."""
        work = self.carrier.prepare(order)
        result = work.run()
        assert result is not None
        assert not isinstance(order, Forget)
        assert result.number == order.number
        assert result.seconds >= 0
        return result

    def copy_out(self, segment: int = 1) -> None:
        """Copy pages 1 to 5, and of the window 7 and 9."""
        pages = {FULL: array(1, 2, 3, 4, 5), WINDOW: array(7, 9)}
        assert self.do(CopyOut(1, segment, pages)).refusal is None

    def write(self, segment: int = 1) -> TierResult:
        """Write it to disk."""
        return self.do(WriteFile(2, segment, self.found, 0, 0))

    def copy_in(self, *, from_disk: bool, segment: int = 1) -> CopyIn:
        """The order to copy it to pages 20 to 24, without the first, and 21 and 20."""
        pages = {FULL: (1, array(20, 21, 22, 24)), WINDOW: (0, array(21, 20))}
        found = self.found if from_disk else None
        return CopyIn(3, (ReadPart(segment, found, pages),), 0)

    def is_copied(self) -> bool:
        """Whether it is there."""
        full, window = self.pools[FULL][0], self.pools[WINDOW][0]
        is_full = torch.equal(full[:, [20, 21, 22, 24]], full[:, [2, 3, 4, 5]])
        return is_full and torch.equal(window[[21, 20]], window[[7, 9]])


def array(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "kv")


@pytest.mark.parametrize("from_disk", [False, True])
def test_pages_go_out_and_come_back(house: House, from_disk: bool) -> None:
    house.copy_out()
    assert house.carrier.page_bytes == {FULL: 16, WINDOW: 6}
    if from_disk:
        assert house.write().refusal is None
        house.carrier.prepare(Forget(segments=(1,)))
    before = {pool: tensor.clone() for pool, (tensor, _) in house.pools.items()}
    assert house.do(house.copy_in(from_disk=from_disk)).refusal is None
    assert house.is_copied()
    others = [page for page in range(NUM_PAGES) if page not in (20, 21, 22, 24)]
    assert torch.equal(house.pools[FULL][0][:, others], before[FULL][:, others])


def test_what_an_order_reads_stays_until_it_was_read(house: House) -> None:
    house.copy_out()
    reading = house.carrier.prepare(house.copy_in(from_disk=False))
    writing = house.carrier.prepare(WriteFile(2, 1, house.found, 0, 0))
    forgetting = house.carrier.prepare(Forget(segments=(1,)))
    assert forgetting.thread is TierThread.COPY
    assert forgetting.run() is None
    assert not house.carrier._segments
    for work in (reading, writing):
        result = work.run()
        assert result is not None
        assert result.refusal is None
    assert house.is_copied()
    assert house.do(house.copy_in(from_disk=True)).refusal is None


def test_what_was_forgotten_is_not_read(house: House) -> None:
    assert house.do(house.copy_in(from_disk=False)).refusal is Refusal.FAILED
    assert house.write().refusal is Refusal.FAILED
    assert house.do(ListFiles(1, 1000)).files == ()


def test_what_may_wait_for_the_disk_says_so(house: House) -> None:
    prepare = house.carrier.prepare
    assert prepare(CopyOut(1, 1, {FULL: array(1), WINDOW: array()})).thread is TierThread.COPY
    assert prepare(house.copy_in(from_disk=False)).thread is TierThread.COPY
    assert prepare(house.copy_in(from_disk=True)).thread is TierThread.DISK
    assert prepare(WriteFile(1, 1, house.found, 0, 0)).thread is TierThread.DISK
    assert prepare(FindFiles(1, house.found.file, house.tokens)).thread is TierThread.DISK
    assert prepare(ListFiles(1, 1000)).thread is TierThread.DISK
    assert prepare(MeasureRoom(1)).thread is TierThread.DISK
    assert prepare(Forget(files=(b"",))).thread is TierThread.DISK
    assert prepare(Forget(all_files=True)).thread is TierThread.DISK


def test_a_file_that_is_wrong_or_gone_names_its_segment(house: House) -> None:
    house.copy_out()
    house.write()
    later = FoundFile(key_of(path_of(7), 20), path_of(7)[20:], {FULL: (5, 7), WINDOW: (5, 5)})
    more = ReadPart(2, later, {FULL: (0, array(25, 26))})
    order = CopyIn(3, (*house.copy_in(from_disk=True).parts, more), 0)
    result = house.do(order)
    assert (result.refusal, result.wrong_segment) == (Refusal.GONE, 2)
    raw = bytearray(house.file.read_bytes())
    raw[-1] ^= 1
    house.file.write_bytes(raw)
    result = house.do(order)
    assert (result.refusal, result.wrong_segment) == (Refusal.WRONG, 1)
    assert not house.file.exists()


def test_what_was_written_is_found_and_listed_and_a_wrong_one_refused(house: House) -> None:
    house.copy_out()
    house.write()
    size = house.file.stat().st_size
    assert house.do(ListFiles(1, 1000)).files == ((house.found.file.file_id, size),)
    find = FindFiles(1, house.found.file, house.tokens)
    (found,) = house.do(find).found
    assert found.file == house.found.file
    os.truncate(house.file, size - 1)
    result = house.do(find)
    assert (result.refusal, result.found) == (Refusal.WRONG, ())
    result = house.do(find)
    assert (result.refusal, result.found) == (None, ())


def test_a_disk_says_what_room_it_has_left_beside_its_reserve(house: House) -> None:
    house.copy_out()
    assert house.do(MeasureRoom(1)).room_bytes == (1 << 30) - (1 << 29)
    house.free_bytes = 0
    assert house.do(MeasureRoom(1)).room_bytes == -(1 << 29)
    house.disk_bytes = 1 << 40
    assert house.do(MeasureRoom(1)).room_bytes == -(1 << 30)
    result = house.write()
    assert (result.refusal, result.room_bytes) == (Refusal.NO_ROOM, -(1 << 30))
    house.free_bytes = 2 << 30
    result = house.write()
    assert (result.refusal, result.room_bytes) == (None, 1 << 30)


def test_what_would_take_of_the_reserve_is_not_begun(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.copy_out()
    house.write()
    size = house.file.stat().st_size
    house.file.unlink()
    house.free_bytes = (1 << 29) + size - 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", None)
        assert house.write().refusal is Refusal.NO_ROOM
    house.free_bytes += 1
    assert house.write().refusal is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_for_a_file_is_told_apart_from_one_that_fails(
    house: House, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    house.copy_out()

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", fail)
    assert house.write().refusal is Refusal.NO_ROOM
    assert not house.file.exists()
    code = errno.EIO
    assert house.write().refusal is Refusal.FAILED


def test_what_is_read_counts_as_used(house: House) -> None:
    house.copy_out()
    house.write()
    os.utime(house.file, ns=(0, 0))
    assert house.do(house.copy_in(from_disk=True)).refusal is None
    assert house.file.stat().st_mtime_ns > 0


def test_a_dead_disk_fails_what_is_ordered_of_it_and_nothing_is_raised(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.copy_out()
    house.write()

    def dead(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for name in ("open", "scandir", "unlink", "rename", "utime", "write", "fsync", "pread"):
        monkeypatch.setattr(os, name, dead)
    assert house.write().refusal is Refusal.FAILED
    assert house.do(ListFiles(1, 1000)).refusal is Refusal.FAILED
    assert house.do(house.copy_in(from_disk=True)).refusal is Refusal.WRONG
    assert house.do(FindFiles(1, house.found.file, house.tokens)).refusal is Refusal.WRONG
    for order in (Forget(all_files=True), Forget(files=(house.found.file.file_id,))):
        assert house.carrier.prepare(order).run() is None
    assert house.do(house.copy_in(from_disk=False)).refusal is None
    assert house.is_copied()


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("CUDA out of memory")])
def test_without_memory_a_copy_fails_and_leaves_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def none_left(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(kv_carrier, "host_memory", none_left)
    pages = {FULL: array(1, 2, 3, 4, 5), WINDOW: array(7, 9)}
    assert house.do(CopyOut(1, 1, pages)).refusal is Refusal.FAILED
    assert not house.carrier._segments
    monkeypatch.undo()
    house.copy_out()
    house.write()
    monkeypatch.setattr(house.files, "read", none_left)
    result = house.do(house.copy_in(from_disk=True))
    assert (result.refusal, result.wrong_segment) == (Refusal.FAILED, None)
    assert house.file.exists(), "the file has done nothing wrong"


def test_files_are_forgotten_one_by_one_and_all(house: House) -> None:
    house.copy_out()
    house.write()
    house.carrier.prepare(Forget(files=(house.found.file.file_id, b"\0" * 32))).run()
    assert house.do(ListFiles(1, 1000)).files == ()
    house.write()
    house.carrier.prepare(Forget(all_files=True)).run()
    assert house.do(ListFiles(1, 1000)).files == ()
