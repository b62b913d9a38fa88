"""Of a session that is deleted nothing stays in host memory or on disk that only it had."""

from __future__ import annotations

import numpy as np
import pytest

from cache.tiers.segment_tree import SegmentTree
from cache.types import SessionId, TurnId
from session_server.core.commands import (
    CloseSession,
    CoolSession,
    DraftInput,
    ForgetKV,
    Shutdown,
)
from session_server.core.events import KVForgotten
from session_server.core.tier_orders import Refusal, TierResult, WriteFile
from session_server.engine.tiers import pace
from session_server.engine.tiers.costs import Route
from tests.engine.bench import Bench
from tests.scenarios.lines import distinct
from tests.sim.carrier import EchoCarrier, EchoDisk
from tests.sim.hand_engine import Sizes

MIB = 1 << 20
SEGMENT_BYTES = 4096
ON_DISK = Sizes(num_pages=40, host_kv_bytes=MIB, disk_kv_bytes=MIB, segment_pages=2)


def tree_of(bench: Bench) -> SegmentTree:
    return bench.hand.engine.inspect().tiers.store.tree


def disk_of(bench: Bench) -> EchoDisk:
    assert bench.hand.carrier is not None
    return bench.hand.carrier.disk


def say(bench: Bench, name: str, seed: int, num_tokens: int, *, base_len: int = 0) -> None:
    """A turn, after which the session is cooled."""
    command = bench.submit_command(
        SessionId(name), f"{name} {seed}", distinct(seed, num_tokens), base_len=base_len
    )
    bench.run(command)
    bench.run(CoolSession(session_id=SessionId(name)))


def restarted(first: Bench, *commands: ForgetKV) -> Bench:
    """The engine of the next process, which has the files of the one before; `commands` come
    first."""
    first.run(Shutdown())
    assert len(disk_of(first).files) > 2
    second = Bench(ON_DISK)
    assert second.hand.carrier is not None
    second.hand.carrier.disk = disk_of(first)
    second.run(*commands)
    return second


def forget(tokens: tuple[int, ...], *, num_kept: int = 0, number: int | None = None) -> ForgetKV:
    """What the server says of a session that is not open, and was deleted or cut."""
    data = np.array(tokens, "<i4").tobytes()
    return ForgetKV(tenant_salt="a", tenant="", tokens=data, num_kept=num_kept, number=number)


def test_its_end_gave_way_before() -> None:
    bench = Bench(Sizes(num_pages=40, host_kv_bytes=8 * (SEGMENT_BYTES + 200), segment_pages=2))
    bench.open("long")
    bench.open("other")
    say(bench, "long", 1, 40)
    num_first = len(tree_of(bench))
    say(bench, "other", 2, 40)
    assert num_first < len(tree_of(bench)) < 2 * num_first, "some gave way, and some did not"
    bench.run(CloseSession(session_id=SessionId("other")))
    bench.run(CloseSession(session_id=SessionId("long")))
    assert len(tree_of(bench)) == 0


def test_its_history_was_cut_and_went_on_otherwise() -> None:
    bench = Bench(Sizes(num_pages=40, host_kv_bytes=MIB, segment_pages=2))
    bench.open("session")
    say(bench, "session", 1, 40)
    say(bench, "session", 2, 20, base_len=20)
    bench.run(CloseSession(session_id=SessionId("session")))
    assert len(tree_of(bench)) == 0


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_its_history_was_cut_and_what_follows_was_not_copied(num_tokens: int) -> None:
    """It comes back, with a history that is less than a page or not worth a copy."""
    bench = Bench(Sizes(num_pages=40, host_kv_bytes=MIB, segment_pages=2))
    session_id = bench.open("session")
    say(bench, "session", 1, 40)
    costs = bench.hand.engine.inspect().tiers.store.costs
    costs.prefill_per_s, costs.bytes_per_s = 1e9, dict.fromkeys(Route, 1.0)
    new = distinct(2, num_tokens)
    bench.run(bench.submit_command(session_id, "t", new, max_tokens=2))
    bench.run(CloseSession(session_id=session_id, is_deleted=False))
    assert len(tree_of(bench)) == 0


@pytest.mark.parametrize("base_len", [0, 20, 21])
@pytest.mark.parametrize("is_deleted", [True, False])
@pytest.mark.parametrize("is_drafted", [True, False])
def test_its_history_was_cut_while_the_pools_had_all_of_it(
    base_len: int, *, is_deleted: bool, is_drafted: bool
) -> None:
    """It was closed and came back: nothing of it was copied since, neither in nor out."""
    bench = Bench(Sizes(num_pages=200, host_kv_bytes=MIB, segment_pages=2))
    session_id = bench.open("session")
    say(bench, "session", 1, 40)
    history = distinct(1, 40) + tuple(bench.tokens("session 1"))
    bench.run(CloseSession(session_id=session_id, is_deleted=False))
    bench.open("session", tokens=history[:-1])
    last_len = len(history) - 1
    bench.run(bench.submit_command(session_id, "t", history[-1:], base_len=last_len))
    new = distinct(2, 20)
    if is_drafted:
        draft_id = TurnId("draft")
        bench.run(
            DraftInput(session_id=session_id, draft_id=draft_id, base_len=base_len, tokens=new)
        )
    bench.run(bench.submit_command(session_id, "u", new, base_len=base_len))
    bench.run(CloseSession(session_id=session_id, is_deleted=is_deleted))
    if not is_deleted:
        bench.run(forget(history[:base_len] + new + tuple(bench.tokens("u"))))
    assert len(tree_of(bench)) == 0


def held_by_two() -> Bench:
    """Sessions "one" and "two" have said the same, and are cold."""
    bench = Bench(Sizes(num_pages=40, host_kv_bytes=MIB, segment_pages=2))
    for name in ("one", "two"):
        bench.open(name)
        bench.run(bench.submit_command(SessionId(name), name, distinct(1, 40)))
        bench.run(CoolSession(session_id=SessionId(name)))
    return bench


def test_what_others_have_of_what_was_cut_off_stays() -> None:
    bench = held_by_two()
    num_segments = len(tree_of(bench))
    bench.run(bench.submit_command(SessionId("one"), "t", distinct(2, 1), base_len=20))
    assert len(tree_of(bench)) == num_segments


def test_it_was_not_used_since_the_server_started() -> None:
    first = Bench(ON_DISK)
    first.open("session")
    say(first, "session", 1, 40)
    second = restarted(first)
    history = distinct(1, 40) + tuple(first.tokens("session 1"))
    second.open("session", tokens=history)
    second.run(CloseSession(session_id=SessionId("session")))
    assert not disk_of(second).files
    assert len(tree_of(second)) == 0


def test_the_engine_does_not_know_it_and_its_files_go_unread() -> None:
    first = Bench(ON_DISK)
    first.open("session")
    say(first, "session", 1, 40)
    history = distinct(1, 40) + tuple(first.tokens("session 1"))
    second = restarted(first)
    second.run(forget(history[:-1]))
    assert not disk_of(second).files
    assert not second.hand.engine.inspect().tiers.store.counts.lookups


def test_what_the_disk_has_is_not_known_yet() -> None:
    first = Bench(ON_DISK)
    first.open("session")
    say(first, "session", 1, 40)
    history = distinct(1, 40) + tuple(first.tokens("session 1"))
    second = restarted(first, forget(history))
    assert not disk_of(second).files


def test_a_file_in_its_middle_is_gone() -> None:
    first = Bench(ON_DISK)
    first.open("session")
    say(first, "session", 1, 40)
    files = disk_of(first).files
    history = distinct(1, 40) + tuple(first.tokens("session 1"))
    first.run(Shutdown())
    del files[next(key for key, each in files.items() if each.found.file.start == 8)]
    second = restarted(first)
    second.run(forget(history))
    assert not disk_of(second).files


@pytest.mark.parametrize("is_read", [True, False])
def test_what_was_cut_off_goes_and_the_rest_stays(*, is_read: bool) -> None:
    first = Bench(ON_DISK)
    first.open("session")
    say(first, "session", 1, 40)
    history = distinct(1, 40) + tuple(first.tokens("session 1"))
    second = restarted(first)
    if is_read:
        second.open("session", tokens=history[:-1])
        command = second.submit_command(SessionId("session"), "t", history[-1:], base_len=43)
        second.run(command)
        assert second.finished("t").cached_tokens > 30
        second.run(CloseSession(session_id=SessionId("session"), is_deleted=False))
    second.run(forget(history, num_kept=17))
    starts = {each.found.file.start for each in disk_of(second).files.values()}
    assert starts == {0, 8}
    second.run(forget(history[:17]))
    assert not disk_of(second).files


def test_the_engine_was_told_that_it_comes_back() -> None:
    bench = Bench(Sizes(num_pages=40, host_kv_bytes=MIB, segment_pages=2))
    bench.open("session")
    say(bench, "session", 1, 40)
    history = distinct(1, 40) + tuple(bench.tokens("session 1"))
    bench.run(CloseSession(session_id=SessionId("session"), is_deleted=False))
    assert len(tree_of(bench)) > 0
    bench.run(forget(history))
    assert len(tree_of(bench)) == 0


def test_files_that_another_one_follows_stay_for_it() -> None:
    first = Bench(ON_DISK)
    prefix = distinct(1, 20)
    for name, seed in (("one", 2), ("two", 3)):
        first.open(name)
        first.run(first.submit_command(SessionId(name), name, prefix + distinct(seed, 20)))
        first.run(CoolSession(session_id=SessionId(name)))
    one = prefix + distinct(2, 20) + tuple(first.tokens("one"))
    two = prefix + distinct(3, 20) + tuple(first.tokens("two"))
    second = restarted(first)
    second.run(forget(one))
    assert disk_of(second).files
    second.open("two", tokens=two[:-1])
    second.run(second.submit_command(SessionId("two"), "t", two[-1:], base_len=len(two) - 1))
    assert second.finished("t").cached_tokens > len(prefix) + 16
    second.run(CloseSession(session_id=SessionId("two")))
    assert not disk_of(second).files
    assert len(tree_of(second)) == 0


def test_what_others_have_stays() -> None:
    bench = held_by_two()
    num_segments = len(tree_of(bench))
    bench.run(CloseSession(session_id=SessionId("one")))
    assert len(tree_of(bench)) == num_segments
    bench.run(CloseSession(session_id=SessionId("two")))
    assert len(tree_of(bench)) == 0


def answers(bench: Bench) -> list[bool]:
    """What the engine has answered of what it was told to forget."""
    return [each.is_gone for each in bench.events if isinstance(each, KVForgotten)]


def carrier_of(bench: Bench) -> EchoCarrier:
    assert bench.hand.carrier is not None
    return bench.hand.carrier


def carry(bench: Bench) -> None:
    while carrier_of(bench).num_waiting:
        carrier_of(bench).carry(0)
        bench.run()


@pytest.mark.parametrize("is_stuck", [True, False])
def test_it_is_answered_once_the_disk_has_let_go_of_its_files(*, is_stuck: bool) -> None:
    first = Bench(ON_DISK)
    first.open("session")
    say(first, "session", 1, 40)
    history = distinct(1, 40) + tuple(first.tokens("session 1"))
    second = restarted(first)
    carrier_of(second).at_once, disk_of(second).is_stuck = False, is_stuck
    second.run(forget(history, number=7))
    assert not answers(second), "the disk was asked"
    carry(second)
    assert answers(second) == [not is_stuck]


def test_those_of_one_step_wait_for_the_disk_together() -> None:
    bench = Bench(ON_DISK)
    carrier_of(bench).at_once = False
    carry(bench)
    bench.run(*(forget(distinct(number, 40), number=number) for number in range(5)))
    assert carrier_of(bench).num_waiting == 1
    carry(bench)
    assert answers(bench) == [True] * 5


def test_it_is_answered_without_a_disk_too() -> None:
    for sizes in (Sizes(), Sizes(num_pages=40, host_kv_bytes=MIB)):
        bench = Bench(sizes)
        bench.run(forget(distinct(1, 40), number=7))
        assert answers(bench) == [True]


def test_a_file_that_is_being_written_is_gone_before_it_is_answered() -> None:
    bench = Bench(Sizes(num_pages=40, host_kv_bytes=MIB, disk_kv_bytes=MIB, segment_pages=2))
    bench.open("session")
    say(bench, "session", 1, 40)
    history = distinct(1, 40) + tuple(bench.tokens("session 1"))
    carrier = carrier_of(bench)
    carrier.at_once = False
    store = bench.hand.engine.inspect().tiers.store
    store.writes.is_draining = True
    store.write_ahead()
    store.writes.is_draining = False
    assert store.is_writing
    bench.run(CloseSession(session_id=SessionId("session")), forget(history, number=7))
    assert [type(order) for order in carrier.waiting] == [WriteFile], "the rest comes behind it"
    assert len(tree_of(bench)) == 0
    carry(bench)
    assert answers(bench) == [True]
    assert not disk_of(bench).files


def test_files_that_followed_a_refused_one_are_gone_before_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(ON_DISK)
    bench.open("session")
    say(bench, "session", 1, 40)
    history = distinct(1, 40) + tuple(bench.tokens("session 1"))
    store = bench.hand.engine.inspect().tiers.store
    while len(store.writes):
        store.writes.is_draining = True
        store.write_ahead()
        store.writes.is_draining = False
        bench.run()
    assert len(disk_of(bench).files) > 4
    monkeypatch.setattr(pace, "NUM_PER_STEP", 1)
    bench.step()
    store.drop(next(each for each in store.tree.segments() if each.parent is None))
    bench.step(forget(history, number=7))
    while not answers(bench):
        bench.step()
    assert answers(bench) == [True]
    assert not disk_of(bench).files


def test_a_disk_that_does_not_say_what_it_has_may_have_more() -> None:
    bench = Bench(ON_DISK)
    store = bench.hand.engine.inspect().tiers.store
    store._take_list(TierResult(1, 0.0, Refusal.FAILED))
    bench.run(forget(distinct(1, 40), number=7))
    assert answers(bench) == [False]


def test_a_disk_that_is_silent_may_have_more() -> None:
    bench = Bench(ON_DISK)
    bench.run()
    carrier_of(bench).at_once = False
    bench.run(forget(distinct(1, 40), number=7))
    due_s = bench.hand.engine.inspect().tiers.store.orders.disk_watch.due_s
    assert due_s is not None
    bench.now_s = due_s
    bench.run()
    assert answers(bench) == [False]
    bench.run(forget(distinct(1, 40), number=8))
    assert answers(bench) == [False, False]
    carry(bench)
    assert answers(bench) == [False, False], "it is answered once"
    bench.run(forget(distinct(1, 40), number=9))
    carry(bench)
    assert answers(bench) == [False, False, True]
