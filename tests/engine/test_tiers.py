"""KV that has to leave the pools goes to host memory and to disk, and comes back."""

from __future__ import annotations

import numpy as np
import pytest

from cache.pair_check import Violation
from cache.types import SessionId, SlotState, TurnId
from session_server.core.commands import (
    CloseSession,
    CoolSession,
    DraftInput,
    DropDraft,
    ReportMemory,
    Shutdown,
    WarmSession,
)
from session_server.core.events import EngineStats
from session_server.core.tier_orders import CopyIn, FindFiles
from session_server.engine.config import MemoryCheck
from session_server.engine.tiers.counts import TierCounts
from tests.engine.bench import Bench
from tests.scenarios.lines import distinct
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers, Mixture

MIB = 1 << 20
PROMPT_LEN = 40


def counts(bench: Bench) -> TierCounts:
    return bench.hand.engine.inspect().tiers.store.counts


def carry_on(bench: Bench) -> None:
    """Carry out all copies that were held back, and every later one at once."""
    carrier = bench.hand.carrier
    assert carrier is not None
    carrier.at_once = True
    carrier.carry_all()
    bench.run()


def first_turns(bench: Bench, num_sessions: int) -> dict[SessionId, tuple[int, ...]]:
    """A turn of each session; together they need more than the pools have."""
    histories = {}
    for index in range(num_sessions):
        session_id, prompt = bench.open(f"s{index}"), distinct(index, PROMPT_LEN)
        bench.run(bench.submit_command(session_id, f"first {index}", prompt))
        histories[session_id] = prompt + tuple(bench.tokens(f"first {index}"))
        bench.expect(f"first {index}", prompt)
    return histories


def second_turns(bench: Bench, histories: dict[SessionId, tuple[int, ...]]) -> int:
    """Another turn of each session; return how many positions they did not compute."""
    num_cached = 0
    for index, (session_id, history) in enumerate(histories.items()):
        turn, new = f"second {index}", distinct(100 + index, 3)
        command = bench.submit_command(session_id, turn, new, base_len=len(history))
        bench.run(command)
        bench.expect(turn, history + new)
        num_cached += bench.finished(turn).cached_tokens
    return num_cached


def leave(bench: Bench, histories: dict[SessionId, tuple[int, ...]], num_others: int = 4) -> None:
    """Cool sessions, and have others take what they left in the pools."""
    bench.run(*(CoolSession(session_id=session_id) for session_id in histories))
    for index in range(num_others):
        other = bench.open(f"other {index}")
        bench.run(bench.submit_command(other, f"big {index}", distinct(50 + index, 240)))
        bench.run(CloseSession(session_id=other))


def assert_nothing_counts_as_unused(bench: Bench) -> None:
    restoring = bench.engine.inspect().tiers._restoring
    assert not restoring._waiting
    assert not restoring._unused
    assert not any(restoring._num_unused.values())


@pytest.mark.parametrize("mixture", Mixture)
@pytest.mark.parametrize("segment_pages", [2, 64])
def test_what_is_cooled_comes_back_from_host_memory(mixture: Mixture, segment_pages: int) -> None:
    sizes = Sizes(
        layers=Layers(mixture),
        num_pages=16 if mixture is Mixture.WINDOW else 40,  # windows are all that it keeps
        host_kv_bytes=MIB,
        segment_pages=segment_pages,
    )
    bench = Bench(sizes)
    histories = first_turns(bench, 8)
    num_cached = second_turns(bench, histories)
    # All but the last page of each, which is not whole, and what windows and states end in.
    assert num_cached >= 8 * (PROMPT_LEN - 2 * sizes.page_size)
    assert counts(bench).restored_tokens > 4 * PROMPT_LEN
    assert counts(bench).failed_copies == 0
    assert bench.hand.engine.inspect().tiers.store.violations() == []
    bench.close_all()
    assert len(bench.hand.engine.inspect().tiers.store.tree) == 0


def test_without_room_outside_it_is_computed_again() -> None:
    bench = Bench(Sizes(num_pages=40))
    histories = first_turns(bench, 8)
    assert second_turns(bench, histories) < 4 * PROMPT_LEN
    assert counts(bench) == TierCounts()


def test_books_of_copies_that_are_wrong_are_found_and_everything_outside_is_dropped() -> None:
    bench = Bench(Sizes(num_pages=40, host_kv_bytes=MIB, memory_check=MemoryCheck.WARN))
    histories = first_turns(bench, 8)
    store = bench.hand.engine.inspect().tiers.store
    store.host.num_bytes += 1
    bench.run(ReportMemory(request_id=1, full=True))
    watch = bench.hand.engine.inspect().watch
    assert watch.num_violations == 1
    assert "host memory" in watch.texts[0]
    assert len(store.tree) == 0
    assert second_turns(bench, histories) < 4 * PROMPT_LEN


def test_what_is_on_disk_is_reported_once_it_is_known() -> None:
    sizes = Sizes(num_pages=80, host_kv_bytes=MIB, disk_kv_bytes=MIB)
    first = Bench(sizes)
    first_turns(first, 1)
    first.run(Shutdown())
    bench = Bench(sizes)
    carrier = bench.hand.carrier
    assert carrier is not None
    assert first.hand.carrier is not None
    carrier.disk = first.hand.carrier.disk
    bench.run()
    reports = [event.tiers for event in bench.events if isinstance(event, EngineStats)]
    assert reports[-1].disk_bytes > 0
    assert (reports[-1].host_max_bytes, reports[-1].disk_max_bytes) == (MIB, MIB)


def test_a_copy_found_on_disk_waits_for_forwards_launched_meanwhile() -> None:
    """One of them may still write the pages for a turn that had them before."""
    sizes = Sizes(num_pages=80, host_kv_bytes=MIB, disk_kv_bytes=MIB)
    first = Bench(sizes)
    histories = first_turns(first, 1)
    first.run(Shutdown())
    bench = Bench(sizes)
    carrier = bench.hand.carrier
    assert carrier is not None
    assert first.hand.carrier is not None
    carrier.disk = first.hand.carrier.disk
    ((_, history),) = histories.items()
    bench.open("other")
    cold = bench.open("cold", tokens=history)
    bench.step(bench.submit_command(SessionId("other"), "long", distinct(7, 3), max_tokens=40))
    carrier.at_once = False
    bench.step()
    assert len(bench.runner) == 2
    command = bench.submit_command(cold, "back", distinct(8, 3), base_len=len(history))
    outcome = bench.step(command)
    assert [type(order) for order in outcome.orders] == [FindFiles]
    bench.settle()  # and the next is launched
    carrier.carry_all()
    outcome = bench.settle()
    assert not outcome.orders
    assert len(bench.runner) == 2
    outcome = bench.settle()
    assert [type(order) for order in outcome.orders] == [CopyIn]
    carry_on(bench)
    bench.expect("back", history + distinct(8, 3))
    assert bench.finished("back").cached_tokens >= len(history) - sizes.page_size


def test_a_copy_back_of_what_was_found_wrong_meanwhile_is_not_used() -> None:
    sizes = Sizes(num_pages=40, host_kv_bytes=MIB, memory_check=MemoryCheck.WARN)
    bench = Bench(sizes)
    carrier = bench.hand.carrier
    assert carrier is not None
    (session_id, history), *_ = first_turns(bench, 8).items()
    assert bench.cache.slot(session_id).state is SlotState.COLD
    carrier.at_once = False
    new = distinct(100, 3)
    bench.step(bench.submit_command(session_id, "second", new, base_len=len(history)))
    assert bench.cache.copies.num_under_way == 1
    (wrong, *_) = [s.session_id for s in bench.cache.slots() if s.state is SlotState.PARKED]
    bench.engine.inspect().watch.note_content([Violation("a page is wrong", wrong)])
    bench.step()
    # What is wrong may have been copied before it was found.
    carrier.doubt()
    carrier.carry_all()
    carrier.at_once = True
    bench.run()
    bench.expect("second", history + new)
    assert counts(bench).restored_tokens == 0
    bench.close_all()


def test_what_a_session_left_that_was_found_wrong_as_it_closed_is_not_used() -> None:
    bench = Bench(Sizes(num_pages=40, host_kv_bytes=MIB, memory_check=MemoryCheck.WARN))
    first_turns(bench, 8)
    (wrong, *_) = [s.session_id for s in bench.cache.slots() if s.state is SlotState.PARKED]
    inspection = bench.engine.inspect()
    assert len(inspection.tiers.store.tree) > 0
    inspection.watch.note_content([Violation("a page is wrong", wrong)])
    bench.step(CloseSession(session_id=wrong))
    assert len(inspection.tiers.store.tree) == 0
    bench.close_all()


def test_a_file_that_is_written_makes_room_at_once_while_the_next_is_written() -> None:
    """Else nothing would be copied before all of host memory is on disk."""
    sizes = Sizes(num_pages=40, host_kv_bytes=6 * 4200, disk_kv_bytes=MIB, segment_pages=2)
    bench = Bench(sizes)
    carrier = bench.hand.carrier
    assert carrier is not None
    bench.run()
    carrier.at_once = False
    first_turns(bench, 3)
    store = bench.hand.engine.inspect().tiers.store
    begun = store.tree.segments()
    while store.tree.segments() == begun:
        carrier.carry(0)
        bench.run()
    assert counts(bench).written_bytes == begun[0].content.num_bytes
    while carrier.num_waiting:
        carrier.carry(0)
        bench.run()
    assert counts(bench).spilled_tokens >= (3 * PROMPT_LEN - sizes.num_pages * sizes.page_size // 4)
    assert counts(bench).dropped_segments == 0


@pytest.mark.parametrize("num_files", [0, 16])
def test_a_session_that_is_longer_than_all_tiers_is_not_copied_for_ever(num_files: int) -> None:
    sizes = Sizes(
        num_pages=60,
        host_kv_bytes=4 * 4200,
        disk_kv_bytes=num_files * 4200,
        segment_pages=1,
    )
    bench = Bench(sizes)
    session_id, prompt = bench.open("long"), distinct(0, 200)
    bench.run(bench.submit_command(session_id, "first", prompt))  # it comes to rest
    assert bench.hand.engine.inspect().tiers.store.violations() == []


@pytest.mark.parametrize("is_dropped", [False, True])
def test_drafts_that_nobody_sends_do_not_end_copying_ahead(is_dropped: bool) -> None:
    bench = Bench(Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB))
    histories = first_turns(bench, 12)
    leave(bench, histories)
    for index, (session_id, history) in enumerate(histories.items()):
        draft_id, base_len = TurnId(f"draft {index}"), len(history)
        draft = DraftInput(
            session_id=session_id, draft_id=draft_id, base_len=base_len, tokens=(1, 2, 3)
        )
        bench.run(draft)
        if is_dropped:
            bench.run(DropDraft(session_id=session_id))
    assert counts(bench).hits == len(histories)


@pytest.mark.parametrize("mixture", Mixture)
def test_the_turn_of_a_session_that_was_warmed_begins_without_a_copy(mixture: Mixture) -> None:
    # Of windows alone little is kept, so that it takes many others to push one out.
    num_pages, num_others = (44, 30) if mixture is Mixture.WINDOW else (160, 4)
    layers = Layers(mixture)
    bench = Bench(Sizes(layers=layers, num_pages=num_pages, num_rows=4, host_kv_bytes=MIB))
    histories = first_turns(bench, 1)
    leave(bench, histories, num_others)
    ((session_id, history),) = histories.items()
    num_events, num_batches = len(bench.events), len(bench.batches)
    bench.run(WarmSession(session_id=session_id))
    assert bench.cache.slot(session_id).state is SlotState.COLD
    assert (len(bench.events), len(bench.batches)) == (num_events, num_batches)
    num_restored = counts(bench).restored_tokens
    assert num_restored > 0
    assert_nothing_counts_as_unused(bench)
    bench.run(WarmSession(session_id=session_id))  # it is there already
    new = distinct(100, 3)
    command = bench.submit_command(session_id, "second", new, base_len=len(history))
    assert bench.step(command).batch is not None  # in the step in which it came
    bench.run()
    bench.expect("second", history + new)
    assert bench.finished("second").cached_tokens >= PROMPT_LEN - 2 * bench.sizes.page_size
    assert (counts(bench).restored_tokens, counts(bench).failed_copies) == (num_restored, 0)
    bench.run(WarmSession(session_id=session_id))  # it is resident
    assert_nothing_counts_as_unused(bench)
    bench.close_all()


def test_sessions_are_warmed_a_part_of_the_pools_at_a_time() -> None:
    bench = Bench(Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB))
    carrier = bench.hand.carrier
    assert carrier is not None
    histories = first_turns(bench, 12)
    leave(bench, histories)
    carrier.at_once = False
    for _ in range(3):  # asked for again, they are copied once
        bench.run(*(WarmSession(session_id=session_id) for session_id in histories))
    num_under_way = bench.cache.copies.num_under_way
    assert 0 < num_under_way <= 160 // 4 // (PROMPT_LEN // 4)
    (first, history), *_ = histories.items()
    new = distinct(100, 3)
    bench.run(bench.submit_command(first, "second", new, base_len=len(history)))
    assert bench.cache.copies.num_under_way == num_under_way  # it waits for the same copy
    restoring = bench.engine.inspect().tiers._restoring
    assert sum(map(len, restoring._waiting.values())) == 1
    carry_on(bench)
    bench.expect("second", history + new)
    assert bench.finished("second").cached_tokens >= PROMPT_LEN - 8
    assert_nothing_counts_as_unused(bench)
    for session_id in histories:
        bench.run(WarmSession(session_id=session_id))
    assert counts(bench).hits == len(histories)
    assert_nothing_counts_as_unused(bench)
    bench.close_all()


def test_a_session_that_is_closed_while_it_is_warmed_leaves_nothing() -> None:
    bench = Bench(Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB))
    carrier = bench.hand.carrier
    assert carrier is not None
    histories = first_turns(bench, 1)
    leave(bench, histories)
    (session_id,) = histories
    carrier.at_once = False
    bench.run(WarmSession(session_id=session_id))
    assert bench.cache.copies.num_under_way == 1
    bench.run(CloseSession(session_id=session_id))
    carry_on(bench)
    assert_nothing_counts_as_unused(bench)
    bench.close_all()


@pytest.mark.parametrize("host_kv_bytes", [0, MIB])
def test_a_session_that_is_unknown_or_new_or_has_a_turn_is_not_warmed(host_kv_bytes: int) -> None:
    prompt, num_lookups = distinct(1, PROMPT_LEN), []
    for is_warmed in (False, True):
        bench = Bench(Sizes(host_kv_bytes=host_kv_bytes))
        session_id = bench.open("new")
        names = [SessionId("unknown"), session_id] if is_warmed else []
        warm = [WarmSession(session_id=name) for name in names]
        bench.run(*warm)
        bench.run(bench.submit_command(session_id, "first", prompt), *warm)
        bench.expect("first", prompt)
        num_lookups.append(counts(bench).lookups)
        bench.close_all()
    assert num_lookups[0] == num_lookups[1]


def test_turns_whose_kv_is_copied_back_take_no_place_of_others() -> None:
    bench = Bench(Sizes(num_pages=64, max_running=1, host_kv_bytes=MIB))
    carrier = bench.hand.carrier
    assert carrier is not None
    histories = first_turns(bench, 4)
    bench.run(*(CoolSession(session_id=session_id) for session_id in histories))
    other = bench.open("other")
    bench.run(bench.submit_command(other, "big", distinct(50, 240)))  # nothing of them is left
    bench.run(CloseSession(session_id=other))
    carrier.at_once = False
    new = distinct(100, 3)
    ahead, planned, third, fourth = (
        bench.submit_command(session_id, f"second {index}", new, base_len=len(history))
        for index, (session_id, history) in enumerate(histories.items())
    )
    warm = bench.submit_command(bench.open("warm"), "warm", distinct(60, 8))
    bench.run(ahead, planned, warm, third, fourth)
    assert bench.finished("warm")
    # The fourth comes later: more of them would push each other out.
    assert bench.cache.copies.num_under_way == 3
    carry_on(bench)
    for index, history in enumerate(histories.values()):
        bench.expect(f"second {index}", history + new)
        assert bench.finished(f"second {index}").cached_tokens >= PROMPT_LEN - 8


def test_a_session_that_closes_while_others_are_copied_waits_no_longer() -> None:
    bench = Bench(Sizes(num_pages=40, max_running=4, host_kv_bytes=MIB))
    carrier = bench.hand.carrier
    assert carrier is not None
    histories = first_turns(bench, 4)
    bench.run(*(CoolSession(session_id=session_id) for session_id in histories))
    carrier.at_once = False
    new = distinct(100, 3)
    bench.run(
        *(
            bench.submit_command(session_id, f"second {index}", new, base_len=len(history))
            for index, (session_id, history) in enumerate(histories.items())
        )
    )
    restoring = bench.engine.inspect().tiers._restoring
    assert restoring._deferred
    bench.run(*(CloseSession(session_id=session_id) for session_id in restoring._deferred))
    assert not restoring._deferred
    carry_on(bench)
    assert not restoring._waiting
    assert not restoring._unused
    assert not any(restoring._num_unused.values())


def test_sessions_that_are_longer_than_host_memory_come_to_rest() -> None:
    bench = Bench(Sizes(num_pages=80, host_kv_bytes=6 * 4200, segment_pages=1))
    histories = first_turns(bench, 4)
    store = bench.hand.engine.inspect().tiers.store
    assert counts(bench).spilled_tokens >= PROMPT_LEN // 2
    assert store.host.free_bytes < store.host.max_bytes // 2
    second_turns(bench, histories)


def test_an_end_writes_what_is_worth_it_behind_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Sizes(num_pages=160, host_kv_bytes=MIB, disk_kv_bytes=MIB))
    for name, num_tokens in (("long", PROMPT_LEN), ("short", 9)):
        session_id, prompt = bench.open(name), distinct(num_tokens, num_tokens)
        bench.run(bench.submit_command(session_id, name, prompt))
    assert counts(bench).spilled_bytes == 0
    costs = bench.hand.engine.inspect().tiers.store.costs
    monkeypatch.setattr(
        costs, "is_worth", lambda num_tokens, *_, **__: num_tokens > PROMPT_LEN // 2
    )
    bench.run(Shutdown())
    assert bench.engine.has_shut_down
    assert counts(bench).written_bytes == counts(bench).spilled_bytes > 0


def test_an_end_writes_all_that_the_disk_has_room_for_through_little_host_memory() -> None:
    sizes = Sizes(num_pages=160, host_kv_bytes=12 * 4200, disk_kv_bytes=MIB, segment_pages=2)
    bench = Bench(sizes)
    histories = first_turns(bench, 8)
    bench.run(Shutdown())
    store = bench.hand.engine.inspect().tiers.store
    assert store.disk.num_bytes > store.host.max_bytes
    assert {each for each in histories if not on_disk_len(bench, each, histories)} == set()


def test_an_end_keeps_the_sessions_used_last_where_the_disk_is_small() -> None:
    bench = Bench(Sizes(num_pages=160, host_kv_bytes=MIB, disk_kv_bytes=3 * 8000))
    histories = first_turns(bench, 8)
    first, *others = histories
    again = bench.submit_command(first, "again", (1, 2, 3), base_len=len(histories[first]))
    bench.run(again)
    bench.run(Shutdown())
    kept = [each for each in (first, *reversed(others)) if on_disk_len(bench, each, histories)]
    assert 0 < len(kept) < 8
    assert kept == [first, *reversed(others)][: len(kept)]


def on_disk_len(
    bench: Bench, session_id: SessionId, histories: dict[SessionId, tuple[int, ...]]
) -> int:
    """How much of a session is on disk."""
    namespace = bench.cache.slot(session_id).namespace
    tokens = np.array(histories[session_id], np.int32)
    path = bench.hand.engine.inspect().tiers.store.find(namespace, tokens)
    return sum(len(part.segment.content.tokens) for part in path.parts if part.segment.on_disk)
