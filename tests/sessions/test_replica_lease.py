"""The lease of a replica, over a database that answers late, or not at all, or what is odd."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from session_server.core.errors import SessionMoved
from session_server.sessions.daemon_threads import DaemonThreads
from session_server.sessions.store import lease as leases
from session_server.sessions.store.lease import READS_AT_ONCE, ReplicaLease
from session_server.sessions.store.ownership import Joined, LeaseLost

LEASE_S = 4.0
SOON_S = 20.0


class Paper:
    """A database on paper. `hangs`: what a renewal does not come back from while it is set."""

    read_errors = (OSError,)

    def __init__(self) -> None:
        self.num_joined = self.num_renewed = 0
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        self.asks: list[list[int] | Exception] = []

    def join(self, _address: str, _lease_s: float, *, role: str = "both") -> Joined:
        del role
        self.num_joined += 1
        return Joined(self.num_joined, 0, 0.0)

    def renew(self, _lease_s: float) -> float:
        if self.hangs.is_set():
            self.goes_on.wait(SOON_S)
        self.num_renewed += 1
        return 0.0

    def asked(self, timeout_s: float) -> list[int]:
        if not self.asks:
            self.goes_on.wait(min(timeout_s, 0.05))
            return []
        found = self.asks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def leave(self) -> None:
        """Leave."""

    def explain(self, error: Exception) -> str:
        return repr(error)


@pytest.fixture
def paper() -> Iterator[Paper]:
    made = Paper()
    yield made
    made.goes_on.set()


def run(paper: Paper, do: Callable[[ReplicaLease], Any], *, lease_s: float = LEASE_S) -> None:
    """Do something while a lease is kept."""

    async def main() -> None:
        lease = ReplicaLease(cast(Any, paper), lease_s=lease_s)
        lease.join()
        lease.start(asyncio.get_running_loop())
        try:
            await do(lease)
        finally:
            paper.goes_on.set()
            await lease.stop()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_lease_is_renewed_while_all_reads_wait(paper: Paper) -> None:
    async def check(lease: ReplicaLease) -> None:
        hang = paper.goes_on.wait
        reads = [asyncio.create_task(lease.read(lambda: hang(SOON_S))) for _ in range(40)]
        num_before = paper.num_renewed
        await until(lambda: paper.num_renewed >= num_before + 3)
        assert lease.is_held
        assert paper.num_joined == 1
        paper.goes_on.set()
        await asyncio.gather(*reads)

    run(paper, check)


def test_reads_of_a_database_that_hangs_have_no_more_threads_than_are_read_at_once(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "READ_WAIT_S", 0.05)

    async def check(lease: ReplicaLease) -> None:
        for _ in range(4):
            waits = [lease.read(lambda: paper.goes_on.wait(SOON_S)) for _ in range(READS_AT_ONCE)]
            failed = await asyncio.gather(*waits, return_exceptions=True)
            assert {type(error) for error in failed} == {TimeoutError}
        assert lease._threads.num_alive <= READS_AT_ONCE + 2, "one renews, one listens"
        paper.goes_on.set()
        await until(lambda: lease._threads.num_alive <= 2)
        monkeypatch.setattr(leases, "READ_WAIT_S", SOON_S)
        assert await asyncio.gather(*(lease.read(lambda: 7) for _ in range(40))) == [7] * 40

    run(paper, check, lease_s=60.0)


def test_threads_that_have_ended_are_not_held() -> None:
    threads = DaemonThreads("test")
    for number in range(50):
        assert threads.submit(lambda number=number: number).result(SOON_S) == number
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(SOON_S)
    assert not threads._threads


def test_a_lease_is_over_when_its_time_is_while_a_renewal_waits_for_its_answer(
    paper: Paper,
) -> None:
    async def check(lease: ReplicaLease) -> None:
        lost_s: list[float] = []
        lease.told.on_lost = lambda: lost_s.append(time.monotonic())
        paper.hangs.set()
        until_s = lease._until_s
        await until(lambda: bool(lost_s))
        assert until_s <= lost_s[0] < until_s + SOON_S / 2
        with pytest.raises(SessionMoved):
            lease.check()
        paper.hangs.clear()
        paper.goes_on.set()
        await until(lambda: lease.is_held)
        assert paper.num_joined == 2, "the answer came too late"
        assert len(lost_s) == 1

    run(paper, check)


def test_a_lease_whose_end_cannot_be_told_is_not_begun_anew_before_it_is(
    paper: Paper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "RETRY_S", 0.05)

    async def check(lease: ReplicaLease) -> None:
        def lost() -> None:
            raise ZeroDivisionError

        lease.told.on_lost = lost
        monkeypatch.setattr(paper, "renew", refuse)
        await until(lambda: caplog.text.count("ZeroDivisionError") >= 3)
        assert not lease.is_held
        assert paper.num_joined == 1
        lease.told.on_lost = lambda: None
        await until(lambda: lease.is_held)
        assert paper.num_joined == 2

    def refuse(_lease_s: float) -> float:
        raise LeaseLost

    run(paper, check)


def test_a_replica_listens_on_whatever_it_has_heard(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RETRY_S", 0.01)
    heard: list[int] = []

    def asked(number: int) -> None:
        heard.append(number)
        assert number != 1

    async def check(lease: ReplicaLease) -> None:
        lease.told.on_asked = asked
        paper.asks += [ValueError("odd"), OSError("away"), LeaseLost(), [1, 2], [3]]
        await until(lambda: heard == [1, 2, 3])

    run(paper, check)
