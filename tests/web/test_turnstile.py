"""Messages that arrive together are let in some per iteration of the event loop, in order."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from session_server.web import turnstile
from session_server.web.turnstile import MESSAGES_AT_ONCE, Turnstile
from tests.web.serving import serving
from tests.web.wire_client import turn


class Iterations:
    """Count the iterations of the event loop while the block runs."""

    num = 0

    async def _count(self) -> None:
        while True:
            self.num += 1
            await asyncio.sleep(0)

    async def __aenter__(self) -> Iterations:
        self._task = asyncio.create_task(self._count())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


class Callers:
    """Call a gate, and note the names of those that passed, in `order`."""

    def __init__(self) -> None:
        self.gate, self.order = Turnstile(), list[str]()

    def start(self, *names: str) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._call(name)) for name in names]

    async def _call(self, name: str) -> None:
        await self.gate.enter()
        self.order.append(name)


def test_callers_of_one_iteration_enter_in_their_order_so_many_per_iteration() -> None:
    num_callers, order = 5 * MESSAGES_AT_ONCE + 3, list[int]()
    per_iteration: Counter[int] = Counter()

    async def run() -> None:
        gate = Turnstile()
        async with Iterations() as iterations:

            async def call(number: int) -> None:
                await gate.enter()
                order.append(number)
                per_iteration[iterations.num] += 1

            await asyncio.gather(*(call(number) for number in range(num_callers)))
        assert not gate._waiting

    asyncio.run(run())
    assert order == list(range(num_callers))
    assert max(per_iteration.values()) == MESSAGES_AT_ONCE
    assert len(per_iteration) == 6


def test_who_comes_later_does_not_pass_those_that_wait() -> None:
    async def run() -> None:
        callers = Callers()
        early = callers.start(*(f"early {i}" for i in range(2 * MESSAGES_AT_ONCE)))
        await asyncio.sleep(0)
        assert len(callers.order) == MESSAGES_AT_ONCE
        await asyncio.gather(*early, *callers.start("late"))
        assert callers.order[-1] == "late"

    asyncio.run(run())


def test_who_comes_while_a_waiter_is_let_in_passes_it_by_one_iteration_at_most() -> None:
    async def run() -> None:
        callers = Callers()
        early = callers.start(*(f"early {i}" for i in range(MESSAGES_AT_ONCE + 1)))
        await asyncio.sleep(0)
        late = callers.start("late")
        await asyncio.sleep(0)
        await asyncio.gather(*early, *late, *callers.start("later"))
        assert sorted(callers.order[-3:-1]) == [f"early {MESSAGES_AT_ONCE}", "late"]
        assert callers.order[-1] == "later"

    asyncio.run(run())


def test_one_that_has_left_takes_nobodys_place() -> None:
    async def run() -> None:
        callers = Callers()
        tasks = callers.start(*(str(number) for number in range(3 * MESSAGES_AT_ONCE)))
        await asyncio.sleep(0)
        gone = tasks[MESSAGES_AT_ONCE : 2 * MESSAGES_AT_ONCE]
        for task in gone:
            task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(callers.order) == 2 * MESSAGES_AT_ONCE
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not callers.gate._waiting
        assert not callers.gate._is_scheduled, "at rest it wakes nobody"

    asyncio.run(run())


def test_a_message_is_not_handled_before_it_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        has_come, may_enter = asyncio.Event(), asyncio.Event()

        async def enter(_: Turnstile) -> None:
            has_come.set()
            await may_enter.wait()

        monkeypatch.setattr(Turnstile, "enter", enter)
        async with serving() as this, this.socket(await this.open()) as wire:
            asked = asyncio.create_task(wire.turn("t", **turn(input_ids=[7, 8], max_tokens=3)))
            async with asyncio.timeout(5):
                await has_come.wait()
            await asyncio.sleep(0.05)
            assert not asked.done()
            may_enter.set()
            assert (await asked)["type"] == "turn.completed"

    asyncio.run(run())


def test_sockets_that_speak_at_once_are_all_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turnstile, "MESSAGES_AT_ONCE", 1)

    async def run() -> None:
        async with serving() as this, AsyncExitStack() as stack:
            sockets = [this.socket(await this.open()) for _ in range(6)]
            wires = [await stack.enter_async_context(socket) for socket in sockets]
            asked = (wire.turn("t", **turn(input_ids=[7, 8], max_tokens=3)) for wire in wires)
            ends = await asyncio.gather(*asked)
            assert [end["type"] for end in ends] == ["turn.completed"] * 6

    asyncio.run(run())
