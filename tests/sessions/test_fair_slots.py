"""Slots that owners share in rotation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from session_server.core.errors import ServerBusy
from session_server.core.owner import Owner
from session_server.sessions.fair_slots import FairSlots

A, B, C = Owner("a"), Owner("b"), Owner("c")


class Crowd:
    """Pieces of work of several owners; each ends when told to."""

    def __init__(self, num_slots: int) -> None:
        self.slots = FairSlots(num_slots)
        self.running: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def start(self, *names: str, max_wait_s: float = 1e6) -> None:
        """Start work; the first letter of a name is its owner."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._work(name, max_wait_s))
        await settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await asyncio.gather(*(self.tasks[name] for name in names), return_exceptions=True)
        await settle()

    async def _work(self, name: str, max_wait_s: float) -> None:
        async with self.slots.slot(Owner(name[0]), max_wait_s=max_wait_s):
            self.running.append(name)
            await self.ends[name].wait()
            self.running.remove(name)

    def assert_empty(self) -> None:
        assert not self.slots._waiting
        assert not self.slots._num_held


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def play(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_an_owner_alone_takes_every_slot_and_no_more() -> None:
    async def test() -> None:
        crowd = Crowd(2)
        await crowd.start("a1", "a2", "a3")
        assert crowd.running == ["a1", "a2"]
        await crowd.end("a1")
        assert crowd.running == ["a2", "a3"]
        await crowd.end("a2", "a3")
        crowd.assert_empty()

    play(test())


def test_a_crowd_of_one_owner_counts_as_one_in_the_rotation() -> None:
    async def test() -> None:
        crowd = Crowd(2)
        await crowd.start(*(f"a{number}" for number in range(90)), "b0", "b1", "c0")
        await crowd.end("a0")
        assert crowd.running == ["a1", "b0"], "who holds none comes first"
        await crowd.end("a1")
        assert crowd.running == ["b0", "a2"], "then in rotation"
        await crowd.end("b0")
        assert crowd.running == ["a2", "c0"]
        await crowd.end("c0")
        assert crowd.running == ["a2", "b1"]
        await crowd.end("b1")
        assert crowd.running == ["a2", "a3"]
        await crowd.end(*(f"a{number}" for number in range(90)))
        crowd.assert_empty()

    play(test())


def test_who_waits_too_long_is_refused_as_busy_and_the_next_is_served() -> None:
    async def test() -> None:
        crowd = Crowd(1)
        await crowd.start("a0")
        await crowd.start("b0", max_wait_s=0.0)
        with pytest.raises(ServerBusy, match="wait to be tokenized"):
            await crowd.tasks["b0"]
        await crowd.start("b1")
        await crowd.end("a0")
        assert crowd.running == ["b1"]
        await crowd.end("b1")
        crowd.assert_empty()

    play(test())


@pytest.mark.parametrize("is_granted", [False, True])
def test_work_that_is_given_up_leaves_its_place_to_others(is_granted: bool) -> None:
    async def test() -> None:
        crowd = Crowd(1)
        await crowd.start("a0", "b0", "c0")
        if is_granted:  # in the same iteration of the loop, before the waiting task runs
            crowd.tasks["a0"].cancel()
            await asyncio.sleep(0)
        crowd.tasks["b0"].cancel()
        await settle()
        await crowd.end("a0")
        assert crowd.running[-1] == "c0"
        await crowd.end("c0")
        crowd.assert_empty()

    play(test())
