"""A disk that does not answer: turns go on without it, its pages stay fenced, and it is used again
once it answers.
"""

from __future__ import annotations

import pytest

from cache.types import SessionId
from session_server.core.commands import CoolSession, Shutdown
from session_server.core.tier_orders import CopyIn, FindFiles, ListFiles
from session_server.engine.tiers.disk_watch import DISK_WAIT_S
from tests.engine.bench import Bench
from tests.scenarios.lines import distinct
from tests.sim.carrier import EchoCarrier
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers, Mixture

MIB = 1 << 20
PROMPT_LEN = 40


def carrier_of(bench: Bench) -> EchoCarrier:
    assert bench.hand.carrier is not None
    return bench.hand.carrier


def restarted(
    sizes: Sizes, num_sessions: int, *, lists_files: bool = True
) -> tuple[Bench, dict[SessionId, tuple[int, ...]]]:
    """An engine whose sessions have their KV on disk alone, and their histories. Its disk answers
    nothing from now on; `lists_files`: but what it has."""
    first, histories = Bench(sizes), {}
    for index in range(num_sessions):
        session_id, prompt = first.open(f"s{index}"), distinct(index, PROMPT_LEN)
        first.run(first.submit_command(session_id, f"first {index}", prompt))
        histories[session_id] = prompt + tuple(first.tokens(f"first {index}"))
    first.run(Shutdown())
    assert first.engine.has_shut_down
    bench = Bench(sizes)
    carrier_of(bench).disk = carrier_of(first).disk
    carrier_of(bench).at_once = lists_files
    bench.run()
    carrier_of(bench).at_once = False
    for session_id, history in histories.items():
        bench.open(session_id, tokens=history)
    return bench, histories


def submit(
    bench: Bench, session_id: SessionId, turn: str, history: tuple[int, ...]
) -> tuple[int, ...]:
    new = distinct(100, 3)
    bench.run(bench.submit_command(session_id, turn, new, base_len=len(history)))
    return history + new


def carry(bench: Bench) -> None:
    """The disk answers what it was asked."""
    carrier = carrier_of(bench)
    while carrier.num_waiting:
        carrier.carry(0)
        bench.run()


def silent_s(bench: Bench) -> float | None:
    """When the disk counts as silent."""
    due_s = bench.engine.inspect().tiers.store.orders.disk_watch.due_s
    loop_s = bench.engine.due_s
    assert due_s is None or (loop_s is not None and loop_s <= due_s)
    return due_s


def fall_silent(bench: Bench) -> None:
    """Let so much time pass that the disk counts as silent, as a loop does."""
    due_s = silent_s(bench)
    assert due_s is not None
    assert due_s >= bench.now_s + DISK_WAIT_S / 2
    bench.now_s = due_s
    bench.run()


@pytest.mark.parametrize("mixture", Mixture)
@pytest.mark.parametrize("held", [ListFiles, FindFiles, CopyIn])
def test_a_turn_computes_what_a_silent_disk_does_not_give(mixture: Mixture, held: type) -> None:
    sizes = Sizes(
        layers=Layers(mixture), num_pages=160, num_rows=4, host_kv_bytes=MIB, disk_kv_bytes=MIB
    )
    bench, histories = restarted(sizes, 3, lists_files=held is not ListFiles)
    carrier = carrier_of(bench)
    (s0, h0), (s1, h1), (s2, h2) = histories.items()
    tokens = submit(bench, s0, "second", h0)
    while not any(isinstance(order, held) for order in carrier.waiting):
        carrier.carry(0)
        bench.run()
    assert bench.turns["second"].end is None
    fall_silent(bench)
    bench.expect("second", tokens)
    assert bench.finished("second").cached_tokens == 0
    store = bench.engine.inspect().tiers.store
    num_fenced = sum(each.fenced for each in bench.cache.accounts().values())
    assert bool(num_fenced) is (held is CopyIn)
    assert store.counts.failed_copies == (held is CopyIn)
    # Nobody waits for it any more, and no timer runs.
    num_asked = carrier.num_waiting
    bench.expect("third", submit(bench, s1, "third", h1))
    assert carrier.num_waiting == num_asked
    assert bench.engine.due_s is None
    # Once it answers it is used again, and gives back what it had.
    carry(bench)
    assert not sum(each.fenced for each in bench.cache.accounts().values())
    carrier.at_once = True
    bench.expect("fourth", submit(bench, s2, "fourth", h2))
    assert bench.finished("fourth").cached_tokens >= PROMPT_LEN - 2 * sizes.page_size
    bench.close_all()


def test_what_waits_for_forwards_is_given_up_without_a_fence() -> None:
    sizes = Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB, disk_kv_bytes=MIB)
    bench, histories = restarted(sizes, 2)
    carrier = carrier_of(bench)
    (s0, h0), (s1, h1) = histories.items()
    submit(bench, s0, "held", h0)
    carrier.carry(0)
    bench.run()
    assert [type(order) for order in carrier.waiting] == [CopyIn]
    other = bench.open("other")
    bench.step(bench.submit_command(other, "long", distinct(7, 3), max_tokens=40))
    assert len(bench.runner) == 1
    new = distinct(100, 3)
    bench.step(bench.submit_command(s1, "behind", new, base_len=len(h1)))
    carrier.carry(1)
    bench.step()
    assert bench.cache.copies.num_under_way == 2  # the second is not ordered yet
    due_s = silent_s(bench)
    assert due_s is not None
    bench.now_s = due_s
    bench.step()
    assert bench.cache.copies.num_under_way == 0
    bench.run()
    bench.expect("held", h0 + new)
    bench.expect("behind", h1 + new)
    assert len([order for order in carrier.waiting if isinstance(order, CopyIn)]) == 1
    carry(bench)
    bench.close_all()


def test_a_rebuild_during_a_copy_that_was_given_up_keeps_its_fence() -> None:
    sizes = Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB, disk_kv_bytes=MIB)
    bench, histories = restarted(sizes, 1)
    carrier = carrier_of(bench)
    ((session_id, history),) = histories.items()
    submit(bench, session_id, "second", history)
    carrier.carry(0)
    bench.run()
    fall_silent(bench)
    fenced = {pool: each.fenced for pool, each in bench.cache.accounts().items()}
    assert any(fenced.values())
    bench.cache.rebuild()
    assert {pool: each.fenced for pool, each in bench.cache.accounts().items()} == fenced
    carry(bench)
    assert not any(each.fenced for each in bench.cache.accounts().values())


def test_an_answer_of_the_disk_begins_the_wait_anew() -> None:
    sizes = Sizes(num_pages=160, num_rows=4, host_kv_bytes=MIB, disk_kv_bytes=MIB)
    bench, histories = restarted(sizes, 2)
    carrier = carrier_of(bench)
    for number, (session_id, history) in enumerate(histories.items()):
        submit(bench, session_id, f"second {number}", history)
    before_s = silent_s(bench)
    assert before_s is not None
    bench.now_s = before_s - 1.0
    carrier.carry(0)
    bench.run()
    after_s = silent_s(bench)
    assert after_s is not None
    assert after_s >= bench.now_s + DISK_WAIT_S - 1.0 > before_s
    carry(bench)
    for number, history in enumerate(histories.values()):
        bench.expect(f"second {number}", history + distinct(100, 3))
        assert bench.finished(f"second {number}").cached_tokens >= PROMPT_LEN - 8


def test_an_end_does_not_wait_for_a_silent_disk_longer_than_it_may() -> None:
    sizes = Sizes(num_pages=160, host_kv_bytes=MIB, disk_kv_bytes=MIB, drain_s=3.0)
    bench = Bench(sizes)
    bench.run()
    session_id, prompt = bench.open("s"), distinct(0, PROMPT_LEN)
    bench.run(bench.submit_command(session_id, "first", prompt))
    bench.run(CoolSession(session_id=session_id))
    carrier_of(bench).at_once = False
    bench.run(Shutdown())
    assert not bench.engine.has_shut_down
    due_s = bench.engine.due_s
    assert due_s is not None
    assert due_s <= bench.now_s + sizes.drain_s
    bench.now_s = due_s
    bench.run()
    assert bench.engine.has_shut_down
