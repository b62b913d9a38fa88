"""Who waits for sessions of other replicas, over a database on paper."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from session_server.core.errors import ServerDraining, SessionMoved
from session_server.sessions import lookout as lookouts
from session_server.sessions.lookout import Lookout
from session_server.sessions.registry import SessionRegistry
from session_server.sessions.store.lease import ReplicaLease
from session_server.sessions.store.ownership import HeldBy, Joined

SOON_S = 20.0


class Paper:
    """A database on paper. `holders`: of sessions that others hold, by number."""

    read_errors = (OSError,)

    def __init__(self) -> None:
        self.holders: dict[int, HeldBy] = {}
        self.looks: list[list[int]] = []
        self.asked: list[HeldBy] = []
        self.num_looking = 0
        self.fails = False

    def join(self, _address: str, _lease_s: float, *, role: str = "both") -> Joined:
        del role
        return Joined(1, 0, 0.0)

    def holders_of(self, numbers: Sequence[int]) -> list[HeldBy]:
        self.num_looking += 1
        assert self.num_looking == 1, "one look at a time"
        time.sleep(0.001)
        self.num_looking -= 1
        self.looks.append(list(numbers))
        if self.fails:
            raise OSError("no database")
        return [self.holders[number] for number in numbers if number in self.holders]

    def ask_for(self, held: Sequence[HeldBy]) -> None:
        self.asked += held

    def hold(self, number: int, replica_id: int = 2) -> HeldBy:
        """Have another replica hold a session."""
        self.holders[number] = HeldBy(number, replica_id, f"http://replica-{replica_id}")
        return self.holders[number]


class Bench:
    """Who looks out, and all around it."""

    def __init__(self) -> None:
        self.paper = Paper()
        self.lease = ReplicaLease(cast(Any, self.paper), lease_s=600.0)
        self.lease.join()
        self.sessions = SessionRegistry()
        self.lookout = Lookout(self.lease, self.sessions)

    def wait(self, *held: HeldBy, wait_s: float = SOON_S) -> list[asyncio.Task[HeldBy | None]]:
        """Wait for sessions."""
        until_s = asyncio.get_running_loop().time() + wait_s
        return [asyncio.create_task(self.lookout.until_free(each, until_s)) for each in held]


def run(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(SOON_S):
            await check(Bench())

    asyncio.run(main())


def test_however_many_wait_one_read_looks_for_all_of_them() -> None:
    async def check(bench: Bench) -> None:
        paper = bench.paper
        waiting = bench.wait(*map(paper.hold, range(200)))
        await asyncio.sleep(1.0)
        # Later and later, as one who waits alone would.
        assert len(paper.looks) <= 10
        assert all(look == list(range(200)) for look in paper.looks)
        del paper.holders[7]
        assert await waiting.pop(7) is None
        assert not any(task.done() for task in waiting)
        waiting += bench.wait(paper.hold(300))
        await asyncio.sleep(0.1)
        paper.holders.clear()
        assert await asyncio.gather(*waiting) == [None] * 200
        assert not bench.lookout._waiting

    run(check)


def test_one_who_waits_alone_looks_at_once_and_soon_again() -> None:
    async def check(bench: Bench) -> None:
        (waiting,) = bench.wait(bench.paper.hold(1))
        while not bench.paper.looks:
            await asyncio.sleep(0)
        assert bench.paper.asked == [bench.paper.holders[1]]
        bench.paper.holders.clear()
        began_s = time.monotonic()
        assert await waiting is None
        assert time.monotonic() < began_s + lookouts._LAST_LOOK_S

    run(check)


def test_whoever_holds_a_session_is_asked_again_and_is_told_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookouts, "ASK_AGAIN_S", 0.1)

    async def check(bench: Bench) -> None:
        first = bench.paper.hold(1)
        (waiting,) = bench.wait(first, wait_s=0.8)
        await asyncio.sleep(0.01)
        second = bench.paper.hold(1, replica_id=3)
        assert await waiting == second
        assert bench.paper.asked[0] == first
        assert bench.paper.asked[-1] == second
        assert len(bench.paper.asked) < len(bench.paper.looks)

    run(check)


def test_what_a_look_raises_is_told_to_who_waits_and_to_nobody_who_comes_later() -> None:
    async def check(bench: Bench) -> None:
        bench.paper.fails = True
        failed = await asyncio.gather(
            *bench.wait(*map(bench.paper.hold, range(3))), return_exceptions=True
        )
        assert [type(error) for error in failed] == [OSError] * 3
        bench.paper.fails = False
        (waiting,) = bench.wait(bench.paper.hold(4))
        await asyncio.sleep(0.05)
        del bench.paper.holders[4]
        assert await waiting is None

    run(check)


def test_nobody_waits_in_a_replica_that_ends_or_has_lost_its_lease() -> None:
    async def check(bench: Bench) -> None:
        (waiting,) = bench.wait(bench.paper.hold(1))
        await asyncio.sleep(0.05)
        bench.sessions.is_ending = True
        with pytest.raises(ServerDraining):
            await waiting
        bench.sessions.is_ending = False
        (waiting,) = bench.wait(bench.paper.hold(1))
        await asyncio.sleep(0.05)
        bench.lease._until_s = 0.0
        with pytest.raises(SessionMoved):
            await waiting

    run(check)


def test_one_who_waits_no_longer_is_not_looked_for() -> None:
    async def check(bench: Bench) -> None:
        gone, waiting = bench.wait(bench.paper.hold(1), bench.paper.hold(2))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.sleep(0.3)
        assert bench.paper.looks[-1] == [2]
        waiting.cancel()
        await asyncio.sleep(0.3)
        assert not bench.lookout._waiting
        assert bench.lookout._task is not None
        assert bench.lookout._task.done()

    run(check)
