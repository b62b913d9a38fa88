"""The engine's own threads die or hang: the real loop with its threads, under a real manager."""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec

from session_server.core.errors import EngineUnavailable, TurnNotFound
from session_server.core.session_events import TurnCompleted, TurnEnd, TurnFailedEntry
from session_server.engine.engine import Engine
from session_server.engine_host.inline import InlineEngine
from session_server.sessions.manager import SessionManager
from session_server.sessions.salts import TenantSalts
from session_server.sessions.views import OpenRequest
from tests.engine_host import live_echo
from tests.engine_host.live_echo import LiveEcho, LiveStage, assemble
from tests.faults.points import Points, injects
from tests.rig.moments import OWNER, JumpingLoop, turn
from tests.sessions.world import model_text
from tests.sim.device import EchoRunner

STAGE = LiveStage(is_device=True)
SEAMS: tuple[tuple[type, str], ...] = (
    (Engine, "step"),
    (LiveEcho, "launch"),
    (EchoRunner, "execute"),
    (live_echo._Later, "is_done"),
    (live_echo._Later, "wait"),
)
"""On the loop's thread, the launching one, the waiting one."""

NAMES = (("a", "t1"), ("a", "t2"), ("b", "t1"))


class ThreadDeath(BaseException):
    """What no handler expects."""


@dataclass
class Trap:
    """The call numbered `at` dies, or hangs until `way_out`."""

    at: int
    hangs: bool
    num_calls: int = 0
    has_sprung: bool = False
    way_out: threading.Event = field(default_factory=threading.Event)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, trapped."""

        def call(*args: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self.at:
                self.has_sprung = True
                if not self.hangs:
                    raise ThreadDeath("injected")
                self.way_out.wait()
            return function(*args, **options)

        return call


async def play(trap: Trap, loop: JumpingLoop) -> list[TurnEnd]:
    """Two sessions, three turns, all to their ends."""
    engine = InlineEngine(lambda: assemble(msgspec.msgpack.encode(STAGE)), hang_limit_s=20.0)
    manager = SessionManager(engine, model_text(), salts=TenantSalts(bytes(16)))
    await manager.start()
    try:
        for name in "ab":
            manager.open(OWNER, OpenRequest(session_id=name))
        for session_id, turn_id in NAMES:
            try:
                await manager.submit(OWNER, session_id, turn(turn_id, 5, 6, 7, max_tokens=13))
            except EngineUnavailable:
                assert trap.has_sprung
        ends = [await end_of(manager, trap, loop, name) for name in NAMES]
        assert engine.failed is not None
        assert engine.failed.done() == trap.has_sprung
        return [end for end in ends if end is not None]
    finally:
        trap.at = -1
        trap.way_out.set()
        await manager.stop()


async def end_of(
    manager: SessionManager, trap: Trap, loop: JumpingLoop, name: tuple[str, str]
) -> TurnEnd | None:
    """Wait for the end of a turn that was taken."""
    while True:
        try:
            end = manager.turn(OWNER, *name).end
        except TurnNotFound:
            return None
        if end is not None:
            return end
        hangs = trap.has_sprung and trap.hangs
        if hangs:
            loop.skipped_s += 1.0
        # The engine's threads need the interpreter, unless what they do is hang.
        await asyncio.sleep(0 if hangs else 0.0005)


def strike_every_call(points: Points, *, hangs: bool) -> None:
    """Play once for each call of each seam."""
    for owner, name in SEAMS:
        for at in itertools.count(1):
            trap, loop = Trap(at, hangs), JumpingLoop()
            with mock.patch.object(owner, name, trap.around(getattr(owner, name))):
                ends = loop.run_until_complete(play(trap, loop))
            loop.close()
            if not trap.has_sprung:
                assert [type(end) for end in ends] == [TurnCompleted] * 3
                break
            for end in ends:
                if not isinstance(end, TurnCompleted):
                    assert isinstance(end, TurnFailedEntry)
                    assert end.code == "engine_unavailable"
            points.strike()


@injects("worker thread death", "every call on each of the engine's threads raises", points=100)
def test_a_thread_that_dies_ends_every_turn_and_the_engine_is_given_up(points: Points) -> None:
    strike_every_call(points, hangs=False)


@injects("engine stall", "every call on each of the engine's threads hangs", points=100)
def test_a_thread_that_hangs_ends_every_turn_and_the_engine_is_given_up(points: Points) -> None:
    with mock.patch.object(faulthandler, "dump_traceback") as dump:
        strike_every_call(points, hangs=True)
    assert dump.call_count == points.num, "a thread that hangs is shown where it does"
