"""What wakes the reader and the writer of a socket."""

from __future__ import annotations

import asyncio

import pytest

from session_server.web.signal import MessageQueue, Signal


def test_a_signal_lets_its_waiter_go_on_whenever_it_is_set() -> None:
    async def run() -> None:
        signal = Signal()
        signal.set()
        await signal.wait()
        signal.clear()
        waiter = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        assert not waiter.done()
        signal.set()
        signal.clear()  # before the waiter has run: it waits on
        await asyncio.sleep(0)
        assert not waiter.done()
        signal.set()
        await waiter

    asyncio.run(run())


def test_a_waiter_that_is_cancelled_makes_room_for_the_next() -> None:
    async def run() -> None:
        signal = Signal()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await signal.wait()
        signal.set()
        await signal.wait()

    asyncio.run(run())


def test_a_queue_hands_out_in_order_and_waits_for_more() -> None:
    async def run() -> None:
        queue = MessageQueue()
        assert queue.empty()
        queue.put_nowait("a")
        queue.put_nowait("b")
        assert (queue.empty(), queue.qsize()) == (False, 2)
        assert [await queue.get(), await queue.get()] == ["a", "b"]
        reader = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put_nowait("c")
        assert await reader == "c"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await queue.get()
        queue.put_nowait("d")
        assert await queue.get() == "d", "a reader that was cancelled took nothing"

    asyncio.run(run())
