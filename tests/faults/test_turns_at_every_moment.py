"""Cancels, closes and submits at every moment of an exchange."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from session_server.core.errors import (
    SessionBusy,
    SessionClosing,
    SessionNotFound,
    TurnConflict,
    TurnNotActive,
    TurnNotFound,
)
from session_server.core.session_events import (
    SessionClosed,
    TokenInput,
    TurnCancelled,
    TurnCompleted,
)
from tests.faults.exchange import (
    BEHIND,
    MAIN,
    PROMPT,
    SIZES,
    assert_completed,
    exchange,
)
from tests.faults.points import Points, injects
from tests.rig.moments import OWNER, Rig, at_every_moment, turn
from tests.rig.recovery import folded


@injects("abort storm", "a cancel at every moment, keeping the partial answer or not", points=100)
def test_a_cancel_at_any_moment_leaves_exactly_what_it_says(points: Points) -> None:
    for sizes, keep_partial in zip(SIZES, (True, False), strict=True):
        with Rig(sizes) as rig:
            for _ in at_every_moment(rig, exchange(rig)):
                rig.submit("mine", BEHIND)
                cancel(rig, "main", keep_partial=keep_partial)
                rig.rest()
                end = rig.manager.turn(OWNER, "mine", "main").end
                assert isinstance(end, (TurnCancelled, TurnCompleted))
                assert isinstance(end, TurnCompleted) or end.kept_partial == (
                    keep_partial and bool(end.outcome.usage.input_tokens)
                )
                assert_completed(rig, "mine", "behind")
                assert_completed(rig, "neighbour", "long")
                rig.assert_recovered()
                points.strike()


@injects(
    "abort storm", "forty turns submitted and canceled, at every moment of a neighbor", points=100
)
def test_a_storm_of_cancels_disturbs_nobody_and_leaves_nothing(points: Points) -> None:
    with Rig(SIZES[0]) as rig:
        for moment in at_every_moment(rig, exchange(rig)):
            for number in range(40):
                name = f"storm{number}"
                rig.submit("mine", turn(name, 1 + number % 30, max_tokens=30))
                # Some are cancelled at once, some once the engine has them, some twice.
                if number % 3 == 0:
                    rig.moment()
                cancel(rig, name if number % 5 else None, keep_partial=number % 2 == 0)
                cancel(rig, name, keep_partial=True)
                cancel(rig, "main", keep_partial=moment % 2 == 0)
                if number % 4 == 3:
                    rig.rest()
            rig.rest()
            assert_completed(rig, "neighbour", "long")
            rig.assert_recovered()
            points.strike(40)


@injects("close in prefill or decode", "a close, and another one, at every moment", points=100)
def test_a_close_at_any_moment_ends_the_turn_once_and_frees_everything(points: Points) -> None:
    for sizes in SIZES:
        with Rig(sizes) as rig:
            for _ in at_every_moment(rig, exchange(rig)):
                journal = rig.manager.journal(OWNER, "mine")
                rig.manager.close(OWNER, "mine")
                with contextlib.suppress(SessionNotFound):  # it may be gone at once
                    rig.manager.close(OWNER, "mine")
                with pytest.raises((SessionClosing, SessionNotFound)):
                    rig.submit("mine", turn("late", 1))
                rig.rest()
                assert isinstance(journal.read(0)[-1].entry, SessionClosed)
                requests = rig.requests.pop("mine")
                entries = [found.entry for found in journal.read(0)]
                folded(entries, requests, rig.salt("mine"))
                # The name is free again, and means another conversation.
                assert rig.run(rig.open(session_id="mine"), turn("past", 1))[:1] == (1,)
                assert_completed(rig, "neighbour", "long")
                rig.assert_recovered()
                points.strike()


@injects(
    "second turn while one runs",
    "one that will not wait, one too many in line, at all moments",
    points=160,
)
def test_a_turn_too_many_is_refused_and_the_first_goes_on(points: Points) -> None:
    for sizes in SIZES:
        with Rig(sizes) as rig:
            for _ in at_every_moment(rig, exchange(rig)):
                if rig.manager.get(OWNER, "mine").running_turn is None:
                    rig.assert_recovered()
                    continue
                with pytest.raises(SessionBusy):
                    rig.submit("mine", turn("other", 9, queue=False))
                for number in range(rig.limits.max_queued_turns):
                    rig.submit("mine", turn(f"queued{number}", 1 + number, max_tokens=1))
                with pytest.raises(SessionBusy):
                    rig.submit("mine", turn("other", 9))
                rig.rest()
                assert_completed(rig, "mine", "main")
                assert rig.manager.get(OWNER, "mine").num_turns == 2 + 4
                rig.assert_recovered()
                points.strike(2)


@injects(
    "duplicate submit",
    "the same id with the same and with another body, at every moment",
    points=200,
)
def test_a_turn_sent_twice_runs_once_in_every_phase(points: Points) -> None:
    with Rig(SIZES[0]) as rig:
        for _ in at_every_moment(rig, exchange(rig)):
            rig.submit("mine", BEHIND)
            for request in (MAIN, BEHIND):
                again = rig.submit("mine", request)
                assert again.turn_id == request.turn_id
                other = replace(request, input=TokenInput((31, *PROMPT)))
                with pytest.raises(TurnConflict):
                    rig.submit("mine", other)
            rig.rest()
            for request in (MAIN, BEHIND):
                assert isinstance(rig.submit("mine", request).end, TurnCompleted)
            assert rig.manager.get(OWNER, "mine").num_turns == 3
            rig.assert_recovered()
            points.strike(4)


def cancel(rig: Rig, turn_id: str | None, *, keep_partial: bool) -> None:
    """Cancel; one that has ended, perhaps long ago, is refused, which is right too."""
    with contextlib.suppress(TurnNotActive, TurnNotFound):
        rig.manager.cancel(OWNER, "mine", turn_id, keep_partial=keep_partial)
