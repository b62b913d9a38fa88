"""Of a session that is deleted nothing stays in host memory or on disk that only it had."""

from __future__ import annotations

from cache.tiers.segment_tree import SegmentTree
from cache.types import SessionId
from session_server.core.commands import CloseSession, CoolSession, Shutdown
from tests.engine.bench import Bench
from tests.scenarios.lines import distinct
from tests.sim.carrier import EchoDisk
from tests.sim.hand_engine import Sizes

MIB = 1 << 20
SEGMENT_BYTES = 4096


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


def test_it_was_not_used_since_the_server_started() -> None:
    sizes = Sizes(num_pages=40, host_kv_bytes=MIB, disk_kv_bytes=MIB, segment_pages=2)
    first = Bench(sizes)
    first.open("session")
    say(first, "session", 1, 40)
    first.run(Shutdown())
    assert len(disk_of(first).files) > 2
    second = Bench(sizes)
    assert second.hand.carrier is not None
    second.hand.carrier.disk = disk_of(first)
    second.run()
    history = distinct(1, 40) + tuple(first.tokens("session 1"))
    second.open("session", tokens=history)
    second.run(CloseSession(session_id=SessionId("session")))
    assert not disk_of(second).files
    assert len(tree_of(second)) == 0


def test_what_others_have_stays() -> None:
    bench = Bench(Sizes(num_pages=40, host_kv_bytes=MIB, segment_pages=2))
    for name in ("one", "two"):
        bench.open(name)
        bench.run(bench.submit_command(SessionId(name), name, distinct(1, 40)))
        bench.run(CoolSession(session_id=SessionId(name)))
    num_segments = len(tree_of(bench))
    bench.run(CloseSession(session_id=SessionId("one")))
    assert len(tree_of(bench)) == num_segments
    bench.run(CloseSession(session_id=SessionId("two")))
    assert len(tree_of(bench)) == 0
