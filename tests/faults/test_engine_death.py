"""The engine dies at every moment: who is told what, and what the next engine makes of it."""

from __future__ import annotations

import contextlib

from session_server.core.errors import EngineUnavailable, SessionServerError
from session_server.core.session_events import TurnCompleted, TurnFailedEntry
from tests.faults.exchange import BEHIND, SIZES, assert_completed, exchange
from tests.faults.points import Points, injects
from tests.rig.moments import OWNER, Rig, at_every_moment, turn
from tests.sim.hosted_engine import INBOX_SIZE


@injects(
    "worker process death", "the engine dies at every moment, noticed at once or later", points=100
)
def test_sessions_outlive_an_engine_that_dies_at_any_moment(points: Points) -> None:
    for sizes, delay in zip(SIZES, (0, 3), strict=True):
        with Rig(sizes) as rig:
            for _ in at_every_moment(rig, exchange(rig)):
                is_waiting = rig.submit("mine", BEHIND).position > 0
                rig.engine.crash()
                # Between the death and its discovery the manager knows nothing.
                fresh = rig.open()
                rig.submit(fresh, turn("first", 1, 2))
                for _ in range(delay):
                    rig.moment()
                rig.engine.tell_death()
                rig.rest()
                assert rig.manager.engine_ready is None
                assert_failed_or_completed(rig, "mine", "main", "engine_restarting")
                assert_failed_or_completed(rig, "neighbour", "long", "engine_restarting")
                rig.engine.revive()
                rig.rest()
                assert_completed(rig, fresh, "first")
                if is_waiting:
                    assert_completed(rig, "mine", "behind")
                rig.assert_recovered()
                points.strike()


@injects("worker process death", "the engine is given up at every moment", points=100)
def test_without_an_engine_every_turn_ends_and_nothing_is_taken(points: Points) -> None:
    for sizes in SIZES:
        with Rig(sizes) as rig:
            for _ in at_every_moment(rig, exchange(rig)):
                rig.submit("mine", BEHIND)
                rig.engine.crash()
                rig.engine.tell_death(will_restart=False)
                rig.rest()
                for session_id, turn_id in (("mine", "main"), ("mine", "behind")):
                    assert_failed_or_completed(rig, session_id, turn_id, "engine_unavailable")
                with contextlib.suppress(EngineUnavailable):
                    rig.submit("mine", turn("late", 1))
                    raise AssertionError("a turn was taken that nobody can run")
                rig.check_histories()
                rig.engine.revive()  # for the books; a server would leave
                rig.assert_recovered()
                points.strike()


@injects("worker process death", "its inbox is full at every moment, for a while", points=100)
def test_an_engine_that_takes_nothing_for_a_while_loses_nothing(points: Points) -> None:
    for sizes in SIZES:
        with Rig(sizes) as rig:
            for moment in at_every_moment(rig, exchange(rig)):
                rig.engine.inbox_size = 0
                rig.submit("mine", BEHIND)
                if moment % 3 == 0:
                    with contextlib.suppress(SessionServerError):
                        rig.manager.cancel(OWNER, "mine", "main")
                if moment % 3 == 1:
                    rig.manager.close(OWNER, "neighbour")
                rig.rest()
                rig.engine.inbox_size = INBOX_SIZE
                rig.manager.tick()
                rig.forget_closed()
                rig.assert_recovered()
                points.strike()


def assert_failed_or_completed(rig: Rig, session_id: str, turn_id: str, code: str) -> None:
    """The turn ended before its engine, or with it."""
    end = rig.manager.turn(OWNER, session_id, turn_id).end
    if not isinstance(end, TurnCompleted):
        assert isinstance(end, TurnFailedEntry), end
        assert end.code == code
        assert end.retryable
