"""A loop whose engine waits for nothing but the disk wakes in time to go on without it."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from cache.types import SessionId, TurnId
from session_server.core.commands import EngineCommand, OpenSession, Shutdown, SubmitTurn
from session_server.core.events import EngineEvent, TurnFailed, TurnFinished
from session_server.core.sampling import SamplingParams
from session_server.core.tier_orders import (
    CopyOut,
    ListFiles,
    TierOrder,
    TierResult,
    TierThread,
    TierWork,
    uses_disk,
)
from session_server.engine.tiers import disk_watch
from session_server.engine_host.loop import EngineAssembly, EngineLoop
from session_server.engine_host.tier_threads import NoTiers
from tests.engine_host.live_echo import LiveEcho, LiveStage
from tests.sim.hand_engine import HandEngine, Sizes

WAIT_S = 0.3
DRAIN_S = 3.0
"""In which a loop on a busy machine begins to write, too."""

LONG_S = 3600.0
HISTORY = tuple(range(1, 25))


class HungDisk:
    """A carrier that copies to host memory, and whose disk answers once it `may_go_on`."""

    def __init__(self, *, lists_files: bool) -> None:
        self.may_go_on = threading.Event()
        self._lists_files = lists_files

    def prepare(self, order: TierOrder) -> TierWork:
        """See `TierCarrier.prepare`."""
        match order:
            case CopyOut(number=number):
                return TierWork(TierThread.COPY, lambda: TierResult(number, 0.0))
            case ListFiles(number=number) if self._lists_files:
                return TierWork(TierThread.DISK, lambda: TierResult(number, 0.0))
            case _:
                failed = NoTiers().prepare(order).run
                thread = TierThread.DISK if uses_disk(order) else TierThread.COPY
                return TierWork(thread, lambda: self._hang(failed))

    def _hang(self, then: object) -> TierResult | None:
        self.may_go_on.wait(LONG_S)
        assert callable(then)
        result: TierResult | None = then()
        return result


class Served:
    """A loop on a thread of its own, and the turns that have ended."""

    def __init__(self, carrier: HungDisk, *, drain_s: float = LONG_S) -> None:
        sizes = Sizes(host_kv_bytes=1 << 20, disk_kv_bytes=1 << 20, drain_s=drain_s)
        hand = HandEngine.of(sizes)
        ready = hand.ready(1)
        runner = LiveEcho(sizes.device(sizes.model, lambda _: "a"), LiveStage())
        self.carrier, self.engine = carrier, hand.engine
        self.ended: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        assembly = EngineAssembly(hand.engine, runner, ready, carrier=carrier)
        self.loop = EngineLoop(assembly, self._hear)
        self.thread = threading.Thread(target=self.loop.run, name="loop")
        self.thread.start()

    def turn(self, name: str, *tokens: int) -> TurnFinished:
        """A turn of a new session that said these before, and how it ended."""
        opening = OpenSession(session_id=SessionId(name), tenant_salt="a", tokens=tokens)
        turn = SubmitTurn(
            session_id=SessionId(name),
            turn_id=TurnId(name),
            base_len=len(tokens),
            tokens=(1, 2, 3),
            sampling=SamplingParams(max_tokens=4, seed=1, ignore_eos=True),
        )
        self._take(opening, turn)
        end = self.ended.get(timeout=60)
        assert isinstance(end, TurnFinished), end
        return end

    def stop(self) -> None:
        """End the loop, and wait for its end."""
        self._take(Shutdown())
        self.thread.join(60)
        assert not self.thread.is_alive()

    def _take(self, *commands: EngineCommand) -> None:
        self.loop.take(commands)

    def _hear(self, events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, TurnFinished | TurnFailed):
                self.ended.put(event)


def test_a_turn_that_waits_for_a_silent_disk_alone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_watch, "DISK_WAIT_S", WAIT_S)
    served = Served(HungDisk(lists_files=False), drain_s=WAIT_S)
    assert served.turn("first", *HISTORY).cached_tokens == 0
    watch = served.engine.inspect().tiers.store.orders.disk_watch
    assert watch.is_silent
    assert served.engine.due_s is None
    # Nobody waits any more.
    monkeypatch.setattr(disk_watch, "DISK_WAIT_S", LONG_S)
    served.turn("second", *HISTORY[::-1])
    served.carrier.may_go_on.set()
    while watch.is_silent:
        time.sleep(0.01)
    served.stop()


def test_a_loop_that_is_to_end_waits_for_a_silent_disk_no_longer_than_it_may() -> None:
    served = Served(HungDisk(lists_files=True), drain_s=DRAIN_S)
    served.turn("first")
    served.stop()  # its KV is being written
    assert served.engine.inspect().tiers.store.is_writing
    served.carrier.may_go_on.set()
