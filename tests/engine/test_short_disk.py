"""A disk that others fill: files of KV give way to them, a slice at a time, and come back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cache.types import SessionId
from session_server.core.commands import CoolSession
from session_server.core.events import EngineStats
from session_server.engine.tiers import pace
from session_server.engine.tiers import store as store_module
from session_server.engine.tiers.disk_account import QUOTA_HOLD_S
from session_server.engine.tiers.room_watch import ROOM_INTERVAL_S
from session_server.runner import segment_files, segment_format
from session_server.runner.kv_directory import RESERVE_BYTES, RESERVE_DIVISOR, room_left
from tests.engine.bench import Bench
from tests.engine.test_tier_store import ALICE, SEGMENT, Stock, path
from tests.scenarios.lines import distinct
from tests.sim.carrier import EchoCarrier
from tests.sim.hand_engine import Sizes

MIB = 1 << 20
FILE = SEGMENT - (5 << 9)
"""What a file takes at least: of what is counted for it the header is less."""

FILES = 12


def stocked(directory: Path, num_files: int = FILES) -> Stock:
    """Files on a disk that has room for four more and its reserve, the first of them used longest
    ago."""
    stock = Stock(directory, host=2 * SEGMENT, disk=2 * FILES * SEGMENT)
    stock.disk_bytes = 16 * FILE
    stock.carry()
    for seed in range(num_files):
        assert stock.put(path(seed)) is not None
    while not all(each.on_disk for each in stock.store.tree.segments()):
        stock.store.writes.is_draining = True
        stock.store.write_ahead()
        stock.carry()
    stock.store.writes.is_draining = False
    assert len(stock.names) == num_files
    return stock


def fill(stock: Stock) -> None:
    """Others take all that is free."""
    stock.other_bytes += free_bytes(stock)


def kept(stock: Stock) -> list[int]:
    """The paths that are on disk."""
    on_disk = {each.content.name for each in stock.store.tree.segments() if each.on_disk}
    return [
        seed
        for seed in range(3 * FILES)
        if (parts := stock.store.find(ALICE, path(seed)).parts)
        and parts[0].segment.content.name in on_disk
    ]


def free_bytes(stock: Stock) -> int:
    return stock.statvfs().f_bavail


@pytest.mark.parametrize(
    ("num_bytes", "free", "room"),
    [
        (100 << 30, 50 << 30, (50 << 30) - RESERVE_BYTES),
        (100 << 30, 1 << 29, -(1 << 29)),
        (800, 150, 150 - 800 // RESERVE_DIVISOR),
        (800, 0, -100),
        (0, 0, None),
    ],
)
def test_a_gib_stays_free_or_an_eighth_of_a_small_disk(
    num_bytes: int, free: int, room: int | None
) -> None:
    status = os.statvfs_result((4096, 1, num_bytes, free + 7, free, 0, 0, 0, 0, 255))
    assert room_left(status) == room


def test_files_leave_the_log_its_reserve(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=100 * SEGMENT)
    stock.disk_bytes = 8 * FILE
    stock.carry()
    for seed in range(20):
        assert stock.put(path(seed)) is not None
        assert free_bytes(stock) >= FILE
        stock.assert_bounded()
    num_files = len(stock.names)
    assert num_files in (6, 7)
    assert kept(stock) == list(range(20 - num_files, 20))
    assert stock.store.counts.failed_copies == 0, "what each of them leaves is known"


def test_a_file_that_would_take_the_reserve_is_refused_and_counted(tmp_path: Path) -> None:
    stock = stocked(tmp_path)
    num_written = stock.store.counts.written_bytes
    fill(stock)
    for seed in range(FILES, FILES + 4):
        stock.put(path(seed))
        assert free_bytes(stock) >= 0
        stock.assert_bounded()
    counts = stock.store.counts
    assert 0 < stock.store.disk.num_refused == counts.failed_copies <= 2
    assert free_bytes(stock) >= FILE
    assert counts.written_bytes > num_written, "what gave way has made room for what came later"


def test_files_used_longest_ago_give_way_to_others_and_come_back(tmp_path: Path) -> None:
    stock = stocked(tmp_path)
    stock.measure(0.0)
    assert kept(stock) == list(range(FILES))
    fill(stock)
    stock.measure(ROOM_INTERVAL_S / 2)
    assert kept(stock) == list(range(FILES)), "it is asked now and then"
    for number in range(1, 3):  # a file counts as some bytes more than it has
        stock.measure(number * ROOM_INTERVAL_S)
    assert free_bytes(stock) >= stock.disk_bytes // RESERVE_DIVISOR
    num_files = len(stock.names)
    assert num_files in (9, 10)
    assert kept(stock) == list(range(FILES - num_files, FILES))
    assert stock.store.disk.is_short
    stock.assert_bounded()
    stock.other_bytes = 0
    stock.measure(3 * ROOM_INTERVAL_S)
    assert stock.store.disk.max_bytes > 12 * FILE
    stock.disk_bytes = 1 << 40
    stock.measure(4 * ROOM_INTERVAL_S)
    assert stock.store.disk.max_bytes == stock.store.disk.given_bytes
    assert not stock.store.disk.is_short


def test_a_disk_that_others_fill_again_and_again_has_no_files_in_the_end(tmp_path: Path) -> None:
    stock = stocked(tmp_path)
    for number in range(FILES):
        fill(stock)
        stock.measure(number * ROOM_INTERVAL_S)
    assert not stock.names
    fill(stock)
    stock.measure(FILES * ROOM_INTERVAL_S)
    stock.put(path(FILES))
    stock.put(path(FILES + 1))
    stock.assert_bounded()
    assert not stock.names
    assert stock.store.disk.max_bytes == 0
    stock.other_bytes = 0
    stock.measure((FILES + 1) * ROOM_INTERVAL_S)
    stock.put(path(FILES + 2))
    stock.put(path(FILES + 3))
    assert stock.names
    stock.assert_bounded()


def test_what_host_memory_has_is_written_once_there_is_room_again(tmp_path: Path) -> None:
    stock = stocked(tmp_path)
    for number in range(FILES + 1):
        fill(stock)
        stock.measure(number * ROOM_INTERVAL_S)
    for seed in range(FILES, FILES + 6):
        assert stock.put(path(seed)) is not None, "it waits for no disk"
        stock.assert_bounded()
    assert not stock.names
    stock.other_bytes = 0
    stock.measure((FILES + 1) * ROOM_INTERVAL_S)
    stock.store.writes.is_draining = True
    stock.store.write_ahead()
    stock.carry()
    assert kept(stock) == [FILES + 4, FILES + 5]
    stock.assert_bounded()


def test_much_that_gives_way_does_so_in_slices_and_nothing_is_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = stocked(tmp_path)
    for module in (store_module, pace):
        monkeypatch.setattr(module, "NUM_PER_STEP", 2)
    stock.disk_bytes = 0x7FFF * FILE  # of which the reserve is more than all files
    fill(stock)
    stock.room_watch.ask(0.0)
    for order in stock.store.orders.take():
        stock.finish(order)
    assert stock.begin(path(FILES)) is not None
    for num_left in range(FILES - 2, -1, -2):
        assert stock.store.has_more
        stock.store.advance()
        for order in stock.store.orders.take():
            stock.finish(order)
        assert len(stock.names) == num_left
        assert stock.store.violations() == []
    assert not stock.store.has_more
    stock.carry()
    stock.assert_bounded()


def test_where_a_disk_refuses_and_shows_no_want_of_room_a_part_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = stocked(tmp_path, 8)

    write_all, num_refused = segment_files._write_all, 0

    def refuse(descriptor: int, data: memoryview) -> None:
        nonlocal num_refused
        if len(stock.names) > 8:  # with the one that is written
            num_refused += 1
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        write_all(descriptor, data)

    monkeypatch.setattr(segment_files, "_write_all", refuse)
    for seed in range(20, 26):
        stock.put(path(seed))
        stock.assert_bounded()
    assert num_refused == stock.store.disk.num_refused == 1
    assert len(stock.names) == 7
    assert stock.store.disk.max_bytes == 7 * SEGMENT
    monkeypatch.undo()
    stock.measure(QUOTA_HOLD_S / 2)
    assert stock.store.disk.max_bytes <= 7 * SEGMENT, "a quota says nothing when it is asked"
    stock.measure(QUOTA_HOLD_S)
    assert stock.store.disk.max_bytes >= 10 * SEGMENT
    stock.assert_bounded()


def test_a_file_that_takes_more_than_is_counted_for_it_costs_no_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of a file names each tensor: that of a model of many layers is long."""
    monkeypatch.setattr(segment_format, "FORMAT", "x" * 5000)
    stock = stocked(tmp_path, 8)
    assert stock.file_bytes // 8 > SEGMENT
    stock.other_bytes += (stock.files.room() or 0) - SEGMENT
    for seed in range(FILES, FILES + 4):
        stock.put(path(seed))
    assert stock.store.disk.num_refused > 0
    assert stock.store.counts.written_bytes > 8 * SEGMENT, "one gave way to it"
    assert len(stock.names) == 8
    stock.other_bytes = 0
    stock.measure(ROOM_INTERVAL_S)
    assert stock.store.disk.max_bytes > 8 * SEGMENT, "nothing is held back for a quota"


@pytest.mark.parametrize("says", ["nothing", "error"])
def test_a_disk_that_does_not_say_has_what_it_was_given(tmp_path: Path, says: str) -> None:
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=8 * SEGMENT)

    def statvfs() -> os.statvfs_result:
        if says == "error":
            raise OSError(errno.ENOSYS, "not here")
        return os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))

    stock.statvfs = statvfs  # type: ignore[method-assign]
    stock.carry()
    stock.measure(0.0)
    for seed in range(8):
        stock.put(path(seed))
    assert stock.store.disk.max_bytes == 8 * SEGMENT
    assert stock.store.counts.failed_copies == 0
    stock.assert_bounded()


def test_files_from_before_that_are_not_counted_yet_do_not_count_as_missing(tmp_path: Path) -> None:
    stocked(tmp_path)
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=2 * FILES * SEGMENT)
    stock.disk_bytes = 16 * FILE
    assert stock.room_watch.due_s is None
    stock.carry()
    stock.measure(0.0)
    assert len(stock.names) == FILES
    stock.assert_bounded()


# In an engine


def carrier_of(bench: Bench) -> EchoCarrier:
    assert bench.hand.carrier is not None
    return bench.hand.carrier


def with_files() -> tuple[Bench, list[SessionId]]:
    """An engine at rest that has files, and little host memory."""
    sizes = Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB // 48, disk_kv_bytes=MIB)
    bench, sessions = Bench(sizes), []
    for index in range(8):
        session_id = bench.open(f"s{index}")
        bench.run(bench.submit_command(session_id, f"t{index}", distinct(index, 40)))
        bench.run(CoolSession(session_id=session_id))
        sessions.append(session_id)
    assert len(carrier_of(bench).disk.files) > 4
    return bench, sessions


def wake(bench: Bench) -> None:
    """Let time pass until the engine has something to do by itself, as a loop does."""
    due_s = bench.engine.due_s
    assert due_s is not None
    assert due_s <= bench.now_s + ROOM_INTERVAL_S + 0.1
    bench.now_s = due_s
    bench.run()


def test_an_engine_that_is_told_nothing_gives_room_to_the_log_within_an_interval() -> None:
    bench, _ = with_files()
    disk = carrier_of(bench).disk
    disk.room_bytes = disk.num_bytes // 2
    bench.events.clear()
    wake(bench)
    assert 0 < disk.num_bytes <= disk.room_bytes
    (told,) = (event for event in bench.events if isinstance(event, EngineStats))
    assert told.tiers.disk_max_bytes == disk.room_bytes < told.tiers.disk_given_bytes
    for _ in range(3):
        wake(bench)
    assert sum(isinstance(event, EngineStats) for event in bench.events) == 1
    disk.room_bytes = 1 << 40
    bench.events.clear()
    wake(bench)
    (told,) = (event for event in bench.events if isinstance(event, EngineStats))
    assert told.tiers.disk_max_bytes == told.tiers.disk_given_bytes == MIB
    bench.close_all()


def test_a_question_that_is_not_answered_is_not_asked_again() -> None:
    bench, _ = with_files()
    carrier = carrier_of(bench)
    carrier.at_once = False
    wake(bench)
    num_asked = carrier.num_waiting
    bench.now_s += 2 * ROOM_INTERVAL_S
    bench.run()
    assert carrier.num_waiting == num_asked == 1
    carrier.carry_all()
    bench.run()
    assert bench.engine.due_s is not None
