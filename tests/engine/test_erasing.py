"""What was deleted goes from a shared directory one batch after the other, and what waits for that
is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from session_server.core.commands import ForgetKV, Shutdown
from session_server.core.events import KVForgotten
from session_server.core.tier_orders import DroppedPath, EraseFiles, Refusal, TierOrder, TierResult
from session_server.engine.tiers import erasing as erasing_module
from session_server.engine.tiers.disk_watch import DISK_WAIT_S
from session_server.engine.tiers.erasing import BATCH_TOKENS, MAX_LEFT_TOKENS, Erasing
from session_server.engine.tiers.store import TierStore
from tests.engine.bench import Bench
from tests.engine.test_shared_tiers import SIZES, carrier_of, move, told
from tests.engine.test_tier_store import ALICE, Stock
from tests.engine.test_tier_walks import WIDE
from tests.engine.test_tiers import first_turns


class World:
    """`answers`: what was said, in order, of the histories that were to go."""

    def __init__(self, directory: Path) -> None:
        tree = Stock(directory, host=WIDE).store.tree
        self.store = TierStore(tree, host_bytes=WIDE, disk_bytes=WIDE, is_shared=True)
        self.erasing = Erasing(self.store)
        self.answers: list[bool] = []

    def add(self, num_tokens: int) -> None:
        path = DroppedPath(ALICE, np.zeros(num_tokens, np.int32), 0)
        self.erasing.add((path,), self.answers.append)

    def orders(self) -> Sequence[TierOrder]:
        self.erasing.advance()
        return self.store.orders.take()

    def order(self) -> EraseFiles:
        (order,) = self.orders()
        assert isinstance(order, EraseFiles)
        return order

    def answer(
        self, order: EraseFiles, refusal: Refusal | None = None, *, has_more: bool = False
    ) -> None:
        self.store.orders.handle(TierResult(order.number, 0.0, refusal, has_more=has_more))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_histories_share_an_order_and_the_next_one_waits_for_its_end(world: World) -> None:
    world.add(10)
    first = world.order()
    for _ in range(100):
        world.add(10)
        assert not world.orders()
    world.answer(first, has_more=True)
    slice_after = world.order()
    assert slice_after.paths == ()
    assert not world.answers
    world.answer(slice_after)
    assert world.answers == [True]
    second = world.order()
    assert len(second.paths) == 100
    world.answer(second, Refusal.FAILED)
    assert world.answers == [True] + 100 * [False]
    assert not world.orders()


def test_an_order_names_no_more_histories_than_is_looked_for_at_once(world: World) -> None:
    for _ in range(3):
        world.add(BATCH_TOKENS // 2 - 1000)
    world.add(2 * BATCH_TOKENS)
    sizes = []
    while orders := world.orders():
        (order,) = orders
        assert isinstance(order, EraseFiles)
        sizes.append(len(order.paths))
        world.answer(order)
    assert sizes == [2, 1, 1]


def test_what_waits_is_bounded_and_of_what_is_too_much_it_is_said_that_it_is_left(
    world: World,
) -> None:
    world.add(1)
    world.order()
    num_tokens = 1000
    for _ in range(2 * MAX_LEFT_TOKENS // num_tokens):
        world.add(num_tokens)
    assert world.erasing._num_tokens <= MAX_LEFT_TOKENS
    assert len(world.erasing._waiting) == MAX_LEFT_TOKENS // (num_tokens + 128)
    assert {*world.answers} == {False}
    assert len(world.answers) + len(world.erasing._waiting) == 2 * MAX_LEFT_TOKENS // num_tokens


def test_a_disk_that_says_nothing_keeps_nobody_waiting_and_is_asked_once_it_answers() -> None:
    bench = Bench(SIZES)
    histories = first_turns(bench, 2)
    for session_id in histories:
        move(bench, session_id)
    carrier_of(bench).at_once = False
    first, second = (told(each) for each in histories.values())
    bench.step(ForgetKV(tenant_salt="a", tenant="", tokens=first, number=1))
    outcome = bench.step(ForgetKV(tenant_salt="a", tenant="", tokens=second, number=2))
    assert not any(isinstance(order, EraseFiles) for order in outcome.orders), "one at a time"
    bench.now_s += DISK_WAIT_S + 1
    bench.step()
    forgotten = [each for each in bench.events if isinstance(each, KVForgotten)]
    assert {(each.number, each.is_gone) for each in forgotten} == {(1, False), (2, False)}
    carrier_of(bench).at_once = True
    carrier_of(bench).carry_all()
    bench.run()
    assert not carrier_of(bench).disk.files
    assert len([each for each in bench.events if isinstance(each, KVForgotten)]) == 2


def test_an_engine_that_ends_removes_first_what_was_deleted() -> None:
    bench = Bench(SIZES)
    histories = first_turns(bench, 4)
    for session_id in histories:
        move(bench, session_id)
    for session_id, history in histories.items():
        bench.open(f"{session_id} again", tokens=history)
    carrier_of(bench).at_once = False
    closes = (
        ForgetKV(tenant_salt="a", tenant="", tokens=told(history)) for history in histories.values()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(erasing_module, "BATCH_TOKENS", 1)
        bench.step(*closes, Shutdown())
        assert not bench.engine.has_shut_down
        carrier_of(bench).at_once = True
        carrier_of(bench).carry_all()
        bench.run()
    assert bench.engine.has_shut_down
    assert not carrier_of(bench).disk.files


def test_what_is_dropped_when_all_kv_is_goes_where_others_have_it() -> None:
    bench = Bench(SIZES)
    ((session_id, history),) = first_turns(bench, 1).items()
    move(bench, session_id)
    assert carrier_of(bench).disk.files
    tiers = bench.hand.engine.inspect().tiers
    namespace = next(iter(tiers.store.tree.segments())).content.namespace
    answers: list[bool] = []
    tiers.forget(namespace, np.asarray(history, np.int32), 0, answers.append)
    files = dict(carrier_of(bench).disk.files)
    tiers.clear()
    carrier_of(bench).at_once = False
    orders = bench.step().orders
    assert any(isinstance(order, EraseFiles) for order in orders), "what may be wrong goes at once"
    carrier_of(bench).disk.files |= files  # this engine's are gone, those of others are not
    carrier_of(bench).at_once = True
    carrier_of(bench).carry_all()
    bench.run()
    assert answers == [True]
    assert not carrier_of(bench).disk.files
