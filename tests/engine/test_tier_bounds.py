"""What the engine does about files of KV in one step, and what it remembers of them, is bounded.
Whose they are and when they were used is known after a restart too.
"""

from __future__ import annotations

import secrets
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from cache.tiers import segment as segment_module
from cache.tiers.segment import tenant_tag
from session_server.core.tier_orders import CopyIn, FoundFile, ReadPart, TierResult
from session_server.engine.tiers import forgetting as forgetting_module
from session_server.engine.tiers import store as store_module
from session_server.engine.tiers.costs import Route
from session_server.engine.tiers.forgetting import Forgetting, Forgotten
from session_server.engine.tiers.pace import NUM_PER_STEP
from session_server.engine.tiers.store import TierStore
from session_server.engine.tiers.unread_files import UNREAD_FILE_BYTES
from tests.cache.kv_world import POOL
from tests.engine.test_tier_store import (
    ALICE,
    BOB,
    PAGE_BYTES,
    PAGE_SIZE,
    SEGMENT,
    SEGMENT_PAGES,
    Stock,
    path,
)

NUM_FILES = 20_000


def drain(stock: Stock) -> None:
    """Write what there is, as an engine does at its end."""
    while True:
        stock.store.writes.is_draining = True
        stock.store.write_ahead()
        if not stock.store.is_writing:
            return
        stock.carry()


def ids(num_files: int, tenant: str = "a") -> tuple[bytes, ...]:
    return tuple(secrets.token_bytes(32) + tenant_tag(tenant) for _ in range(num_files))


def listed(store: TierStore, file_ids: tuple[bytes, ...]) -> int:
    """Let these be on disk; return the steps that it took to know them."""
    (order,) = store.orders.take()
    files = tuple((each, 20_000) for each in file_ids)
    store.orders.handle(TierResult(order.number, 0.0, files=files))
    num_steps, num_known = 0, 0
    while store.has_more:
        store.advance()
        num_steps += 1
        assert abs(len(store._unread) - num_known) <= NUM_PER_STEP
        num_known = len(store._unread)
    assert store.is_listed
    return num_steps


# Whose files give way


def test_after_a_restart_who_has_most_gives_way_too(tmp_path: Path) -> None:
    before = Stock(tmp_path, host=10 * SEGMENT, disk=9 * SEGMENT)
    before.carry()
    for seed in range(3):
        before.put(path(seed))
    for seed in range(10, 13):
        before.put(path(seed), BOB)
    drain(before)
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=9 * SEGMENT)
    stock.carry()
    for seed in range(20, 40):
        stock.put(path(seed), BOB)
        stock.assert_bounded()
    assert all(stock.look(path(seed)) for seed in range(3)), "he had most"
    assert not any(stock.look(path(seed), BOB) for seed in range(10, 13)), "used longest ago"


def test_an_end_writes_what_was_used_last_and_pushes_none_of_it_out(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=20 * SEGMENT, disk=4 * SEGMENT)
    stock.carry()
    for seed in range(8):
        stock.put(path(seed))
    stock.store.touch(part.segment for part in stock.store.find(ALICE, path(2)).parts)
    drain(stock)
    assert [seed for seed in range(8) if is_on_disk(stock, seed)] == [2, 5, 6, 7]
    assert stock.store.counts.written_bytes == 4 * SEGMENT, "nothing was written in vain"
    again = Stock(tmp_path, host=10 * SEGMENT, disk=3 * SEGMENT)
    again.carry()
    # A file that was not read counts as more than it will.
    assert [seed for seed in range(8) if again.look(path(seed))] == [2, 7]


def test_at_an_end_what_was_used_longer_ago_gives_way_and_nobody_else(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=3 * SEGMENT)
    stock.carry()
    for seed in range(3):
        stock.put(path(seed))
    drain(stock)
    stock.store.touch(part.segment for part in stock.store.find(ALICE, path(0)).parts)
    for seed in (3, 4):
        stock.put(path(seed))
    stock.store.touch(part.segment for part in stock.store.find(ALICE, path(2)).parts)
    drain(stock)
    assert [seed for seed in range(5) if is_on_disk(stock, seed)] == [2, 3, 4]


def is_on_disk(stock: Stock, seed: int) -> bool:
    parts = stock.store.find(ALICE, path(seed)).parts
    return bool(parts) and parts[0].segment.on_disk


def test_what_gave_way_and_is_used_again_is_written_again(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=2 * SEGMENT)
    stock.carry()
    for seed in range(3):
        stock.put(path(seed))
        drain(stock)
    assert [is_on_disk(stock, seed) for seed in range(3)] == [False, True, True]
    stock.store.touch(part.segment for part in stock.store.find(ALICE, path(0)).parts)
    drain(stock)
    assert [is_on_disk(stock, seed) for seed in range(3)] == [True, False, True]


def test_of_a_path_the_beginning_is_written_first(tmp_path: Path) -> None:
    """A process may end between any two, and a file is found through those before it alone."""
    stock = Stock(tmp_path, host=4 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    long = path(1, 3)
    stock.put(long)
    stock.store.touch(part.segment for part in stock.store.find(ALICE, long).parts)
    stock.put(path(2))
    segments = [part.segment for part in stock.store.find(ALICE, long).parts]
    assert [each.on_disk for each in segments] == sorted(
        (each.on_disk for each in segments), reverse=True
    )
    assert segments[0].on_disk


# Slices


def test_files_from_before_are_entered_a_slice_at_a_time(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=1 << 40)
    num_steps = listed(stock.store, ids(NUM_FILES))
    assert num_steps >= NUM_FILES // NUM_PER_STEP
    assert len(stock.store._unread) == NUM_FILES


def test_a_disk_that_has_become_smaller_is_emptied_a_slice_at_a_time(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=1 << 20)
    file_ids = ids(NUM_FILES)
    listed(stock.store, file_ids)
    kept = [file_id for file_id, _ in stock.store._unread._files.values()]
    assert kept == list(file_ids[-len(kept) :]), "those used last"
    assert 0 < stock.store.disk.num_bytes <= 1 << 20


def test_everything_is_dropped_at_once_and_let_go_of_a_slice_at_a_time(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=1 << 40)
    listed(stock.store, ids(NUM_FILES))
    segment = stock.begin(path(1, 3))
    assert segment is not None
    stock.store.clear()
    assert stock.store.is_empty
    assert (stock.store.host.num_bytes, stock.store.disk.num_bytes) == (0, 0)
    assert stock.store.counts.dropped_segments == 3
    num_steps = 0
    while stock.store.has_more:
        stock.store.advance()
        num_steps += 1
    assert num_steps >= NUM_FILES // NUM_PER_STEP
    assert segment.parent is None


# Memory


def test_what_is_known_of_a_file_takes_no_more_than_it_counts_for(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=1 << 40)
    tracemalloc.start()
    try:
        listed(stock.store, ids(NUM_FILES))
        unread_bytes = tracemalloc.get_traced_memory()[0] / NUM_FILES
        before = tracemalloc.get_traced_memory()[0]
        for seed in range(200):
            tokens = path(seed, 100)
            found = stock.store.find(ALICE, tokens)
            spans = {POOL: (0, len(tokens) // PAGE_SIZE)}
            segment = stock.store.tree.add(ALICE, found, tokens, spans)
            segment.on_disk, segment.used_ns = True, stock.store.uses.next_use()
            stock.store.disk.add(segment)
        known_bytes = (tracemalloc.get_traced_memory()[0] - before) / 200 - tokens.nbytes
    finally:
        tracemalloc.stop()
    assert unread_bytes <= UNREAD_FILE_BYTES
    assert known_bytes <= store_module._KNOWN_FILE_BYTES


def test_beyond_the_memory_for_what_is_known_of_files_those_used_longest_ago_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_one = store_module._KNOWN_FILE_BYTES + 4 * SEGMENT_PAGES * PAGE_SIZE
    monkeypatch.setattr(store_module, "MAX_INDEX_BYTES", 3 * of_one)
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=100 * SEGMENT)
    stock.carry()
    for seed in range(8):
        stock.put(path(seed))
        stock.assert_bounded()
        assert stock.store.disk.num_segments <= 3
    drain(stock)
    assert is_on_disk(stock, 7)


# What was deleted


def test_files_of_others_cost_a_deleted_session_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=1 << 40)
    listed(stock.store, ids(10, tenant="b"))
    assert hashed(stock, monkeypatch) == 1, "the page behind what is known"
    stock.store._unread.add(ids(1, tenant="a")[0], 20_000)
    # And where its own tenant has one it ends where no file can be any more.
    assert hashed(stock, monkeypatch) <= 3


def hashed(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> int:
    """The pages that are hashed to forget a long history."""
    num_pages, real = 0, segment_module.chains_after

    def counted(*arguments: object) -> object:
        nonlocal num_pages
        for chain in real(*arguments):  # type: ignore[arg-type]
            num_pages += 1
            yield chain

    with monkeypatch.context() as patch:
        patch.setattr(segment_module, "chains_after", counted)
        patch.setattr(store_module, "chains_after", counted)
        forgetting = Forgetting(stock.store)
        forgetting.add(Forgotten(ALICE, path(3, 1000)))
        forgetting.advance()
    return num_pages


def test_deleted_histories_are_looked_for_some_tokens_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting_module, "_TOKENS_PER_STEP", 100)
    monkeypatch.setattr(forgetting_module, "_LEAST_TOKENS", 1)
    stock = Stock(tmp_path, host=10 * SEGMENT, disk=1 << 40)
    forgetting = Forgetting(stock.store)
    for seed in range(7):
        forgetting.add(Forgotten(ALICE, path(seed, 10)))
    forgetting.advance()
    assert not forgetting.has_more, "the disk is not known yet"
    listed(stock.store, ids(1))
    num_steps = 0
    while forgetting.has_more:
        forgetting.advance()
        num_steps += 1
    assert num_steps == 4


# What is read


def test_of_a_file_all_is_read_and_counted_as_read(tmp_path: Path) -> None:
    stock = Stock(tmp_path, host=2 * SEGMENT, disk=20 * SEGMENT)
    stock.carry()
    segment = stock.put(path(1))
    assert segment is not None
    drain(stock)
    part = ReadPart(
        segment.number, FoundFile.of(segment.content), {POOL: (1, np.array([40], np.int32))}
    )
    results: list[TierResult] = []
    stock.store.orders.add(lambda number: CopyIn(number, (part,), 0), results.append)
    stock.carry()
    (result,) = results
    (name,) = stock.names
    assert result.read_bytes == (tmp_path / name).stat().st_size > SEGMENT_PAGES * PAGE_BYTES
    assert 0 < result.read_s <= result.seconds
    stock.store.costs.note_copy(Route.READ, result.read_bytes, result.read_s)
