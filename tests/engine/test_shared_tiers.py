"""Engines that share files: what one writes another finds, though it has no list of them."""

from __future__ import annotations

import numpy as np
import pytest

from cache.types import SessionId
from session_server.core.commands import CloseSession, ForgetKV, Shutdown
from session_server.core.events import KVForgotten, SessionWritten
from session_server.core.tier_orders import CopyIn, FindFiles
from session_server.engine.tiers.handovers import HANDOVER_S
from session_server.engine.tiers.shared_index import ASK_AGAIN_S
from session_server.engine.tiers.spilling import REST_S
from tests.engine.bench import Bench
from tests.engine.test_tiers import MIB, counts, first_turns
from tests.scenarios.lines import distinct
from tests.sim.carrier import EchoCarrier
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers, Mixture

SIZES = Sizes(num_pages=160, host_kv_bytes=MIB, disk_kv_bytes=MIB, is_disk_shared=True)


def carrier_of(bench: Bench) -> EchoCarrier:
    assert bench.hand.carrier is not None
    return bench.hand.carrier


def beside(bench: Bench, sizes: Sizes = SIZES) -> Bench:
    """Another engine, with the same disk."""
    other = Bench(sizes)
    carrier_of(other).disk = carrier_of(bench).disk
    return other


def go_on(bench: Bench, history: tuple[int, ...], name: str = "again") -> int:
    """A turn of a session that another engine had; return how much of it was not computed."""
    session_id, new = bench.open(name, tokens=history), distinct(8, 3)
    bench.run(bench.submit_command(session_id, f"turn of {name}", new, base_len=len(history)))
    bench.expect(f"turn of {name}", history + new)
    return bench.finished(f"turn of {name}").cached_tokens


def move(bench: Bench, session_id: SessionId) -> None:
    bench.run(CloseSession(session_id=session_id, is_deleted=False, is_moving=True))


def written(bench: Bench) -> list[SessionId]:
    return [each.session_id for each in bench.events if isinstance(each, SessionWritten)]


@pytest.mark.parametrize("mixture", Mixture)
def test_a_session_that_moves_is_written_at_once_and_restored_by_another_engine(
    mixture: Mixture,
) -> None:
    sizes = Sizes(
        layers=Layers(mixture),
        num_pages=160,
        host_kv_bytes=MIB,
        disk_kv_bytes=MIB,
        is_disk_shared=True,
    )
    bench = Bench(sizes)
    other = beside(bench, sizes)
    histories = first_turns(bench, 2)
    assert not carrier_of(bench).disk.files
    for session_id in histories:
        move(bench, session_id)
    assert written(bench) == [*histories]
    for name, history in histories.items():
        assert go_on(other, history, f"{name} again") >= len(history) - 2 * sizes.page_size
    assert counts(other).restored_tokens > 0
    for each in (bench, other):
        assert each.hand.engine.inspect().tiers.store.violations() == []


def test_a_handover_does_not_wait_for_a_disk_that_is_slow() -> None:
    bench = Bench(SIZES)
    (session_id,) = first_turns(bench, 1)
    carrier_of(bench).at_once = False
    move(bench, session_id)
    assert written(bench) == []
    due_s = bench.engine.due_s
    assert due_s is not None
    assert due_s <= bench.now_s + HANDOVER_S
    bench.now_s += HANDOVER_S
    bench.step()
    assert written(bench) == [session_id]


def test_an_engine_that_ends_writes_what_another_one_finds() -> None:
    bench = Bench(SIZES)
    histories = first_turns(bench, 2)
    bench.run(Shutdown())
    other = beside(bench)
    for name, history in histories.items():
        assert go_on(other, history, f"{name} again") >= len(history) - SIZES.page_size


def test_a_session_at_rest_is_written_after_a_while_for_the_engine_may_be_killed() -> None:
    bench = Bench(SIZES)
    histories = first_turns(bench, 2)
    bench.run()
    assert not carrier_of(bench).disk.files
    bench.now_s += REST_S
    bench.run()
    other = beside(bench)
    for name, history in histories.items():
        assert go_on(other, history, f"{name} again") >= len(history) - SIZES.page_size


def test_what_nobody_has_written_is_asked_for_once_in_a_while() -> None:
    bench, history = Bench(SIZES), distinct(1, 40)

    def num_asked(name: str) -> int:
        carrier_of(bench).at_once = False
        cold = bench.open(name, tokens=history)
        command = bench.submit_command(cold, name, distinct(8, 3), base_len=len(history))
        orders = bench.step(command).orders
        carrier_of(bench).at_once = True
        carrier_of(bench).carry_all()
        bench.run()
        bench.expect(name, history + distinct(8, 3))
        return sum(isinstance(order, FindFiles) for order in orders)

    assert [num_asked("a"), num_asked("b")] == [1, 0]
    bench.now_s += ASK_AGAIN_S
    assert [num_asked("c"), num_asked("d")] == [1, 0]


def test_a_file_that_is_gone_is_computed_and_is_no_bad_file() -> None:
    bench = Bench(SIZES)
    other = beside(bench)
    ((session_id, history),) = first_turns(bench, 1).items()
    move(bench, session_id)
    carrier_of(other).at_once = False
    cold = other.open("cold", tokens=history)
    command = other.submit_command(cold, "back", distinct(8, 3), base_len=len(history))
    assert [type(order) for order in other.step(command).orders] == [FindFiles]
    carrier_of(other).carry_all()
    outcome = other.step()
    assert [type(order) for order in outcome.orders] == [CopyIn]
    carrier_of(other).disk.files.clear()
    carrier_of(other).carry_all()
    carrier_of(other).at_once = True
    other.run()
    other.expect("back", history + distinct(8, 3))
    assert counts(other).refused_files == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_a_session_that_is_closed_where_it_came_to_leaves_no_file_of_where_it_was(
    *, is_known: bool
) -> None:
    bench = Bench(SIZES)
    other = beside(bench)
    ((session_id, history),) = first_turns(bench, 1).items()
    move(bench, session_id)
    whole = history + distinct(8, 3)
    go_on(other, history)
    whole += tuple(other.tokens("turn of again"))
    if is_known:
        other.run(CloseSession(session_id=SessionId("again")))
    else:
        move(other, SessionId("again"))
        assert len(carrier_of(bench).disk.files) == 2
    other.run(ForgetKV(tenant_salt="a", tenant="", tokens=told(whole), number=7))
    assert KVForgotten(number=7, is_gone=True) in other.events
    assert not carrier_of(bench).disk.files


def test_what_a_session_elsewhere_has_in_common_with_a_closed_one_stays() -> None:
    bench, common = Bench(SIZES), distinct(0, 40)
    other = beside(bench)
    go_on(bench, common, "first")
    move(bench, SessionId("first"))
    for name, each in (("kept", bench), ("closed", other)):
        session_id = each.open(name, tokens=common)
        new = distinct(len(name), 9)
        each.run(each.submit_command(session_id, name, new, base_len=len(common)))
        each.expect(name, common + new)
    move(bench, SessionId("kept"))
    other.run(CloseSession(session_id=SessionId("closed")))
    assert len(carrier_of(bench).disk.files) == 2
    assert go_on(beside(bench), common) >= len(common) - SIZES.page_size


def told(tokens: tuple[int, ...]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()
