"""The server is told to stop at every moment of an exchange.

Here the drain itself, in-process; `tests/wire` sends real signals to real servers.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from session_server.core.errors import ServerDraining, SessionNotFound
from session_server.core.session_events import (
    SessionClosed,
    SessionDraining,
    TurnCancelled,
    TurnFailedEntry,
)
from session_server.sessions.journal import Journal
from tests.faults.exchange import BEHIND, SIZES, exchange
from tests.faults.points import Points, injects
from tests.rig.moments import OWNER, Rig, turn
from tests.rig.recovery import folded


def play_until(rig: Rig, moment: int) -> bool:
    """The exchange up to a moment; whether it was over before."""
    exchange(rig)()
    rig.submit("mine", BEHIND)
    for _ in range(moment):
        rig.moment()
    return rig.is_at_rest


def check(rig: Rig, journals: dict[str, Journal]) -> None:
    """Every session was told, every turn has its end, nothing new is taken."""
    for session_id, journal in journals.items():
        entries = [found.entry for found in journal.read(0)]
        folded(entries, rig.requests[session_id], rig.salt(session_id))
        assert isinstance(entries[-1], SessionClosed)
        assert sum(isinstance(entry, SessionDraining) for entry in entries) == 1
        for entry in entries:
            assert not isinstance(entry, TurnFailedEntry)
            assert not isinstance(entry, TurnCancelled) or entry.reason == "draining"
    with pytest.raises(ServerDraining):
        rig.open()
    with pytest.raises(SessionNotFound):
        rig.submit("mine", turn("late", 1))


def strike(rig: Rig, deadline_s: float) -> tuple[dict[str, Journal], asyncio.Task[None]]:
    """Begin to drain; what is running and what waits hears of it at once."""
    journals = {name: rig.manager.journal(OWNER, name) for name in rig.requests}
    is_waiting = rig.manager.turn(OWNER, "mine", "behind").status == "queued"
    draining = rig.loop.create_task(rig.manager.drain(deadline_s))
    rig.spin()
    with pytest.raises(ServerDraining):
        rig.open()
    if is_waiting:
        behind = [found.entry for found in journals["mine"].read(0)][-1]
        assert isinstance(behind, TurnCancelled | SessionClosed)
    return journals, draining


@injects("SIGTERM", "a drain at every moment: with time, without, with a hung engine", points=150)
def test_a_drain_at_any_moment_ends_every_turn_and_every_session(points: Points) -> None:
    for deadline_s, hangs in ((600.0, False), (0.0, False), (0.0, True)):
        for moment in itertools.count():
            with Rig(SIZES[0]) as rig:
                is_over = play_until(rig, moment)
                journals, draining = strike(rig, deadline_s)
                while not draining.done():
                    if hangs:
                        rig.loop.skipped_s += 1.0
                        rig.spin()
                    else:
                        rig.moment()
                check(rig, journals)
                if hangs:
                    assert rig.manager.stats().sessions == 0
                else:
                    rig.assert_empty()
            points.strike()
            if is_over:
                break
