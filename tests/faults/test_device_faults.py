"""The device refuses a forward, or computes nonsense: at every forward, in every row."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from unittest import mock

from session_server.core.batch import Batch, StepResult
from session_server.core.session_events import TurnCompleted, TurnFailedEntry
from tests.faults.exchange import BEHIND, SIZES, assert_completed, exchange
from tests.faults.points import Points, injects
from tests.rig.moments import OWNER, Rig, at_every_moment

TURNS = (("mine", "main"), ("mine", "behind"), ("neighbour", "long"))


def launches(rig: Rig) -> list[Batch]:
    """What the exchange launches when nothing goes wrong."""
    start = len(rig.engine.hand.batches)
    play(rig)
    batches = rig.engine.hand.batches[start:]
    rig.assert_recovered()
    return batches


def play(rig: Rig) -> None:
    """The exchange to its end."""
    exchange(rig)()
    rig.submit("mine", BEHIND)
    rig.rest()


@contextlib.contextmanager
def struck(rig: Rig, numbers: Collection[int], row: int | None = None) -> Iterator[None]:
    """Forwards `numbers` of what is played inside are refused, or row `row` of them is NaN."""
    runner = rig.engine.hand.device
    first = len(rig.engine.hand.batches) + 1
    execute = runner.execute

    def execute_struck() -> StepResult:
        batch = runner.next_batch()
        if batch.step - first in numbers:
            if row is None:
                runner.faults.fail_steps.add(batch.step)
            elif row < len(batch.rows):
                runner.faults.nan_turns.add(batch.rows[row].turn_id)
        return execute()

    with mock.patch.object(runner, "execute", execute_struck):
        yield


@injects("NaN or Inf in the logits", "every row of every forward", points=100)
def test_a_row_of_nonsense_fails_its_turn_and_no_other(points: Points) -> None:
    for sizes in SIZES:
        with Rig(sizes) as rig:
            batches = launches(rig)
            for number, batch in enumerate(batches):
                for index in range(len(batch.rows)):
                    with struck(rig, (number,), index):
                        play(rig)
                    failed = [name for name in TURNS if not is_completed(rig, *name)]
                    for session_id, turn_id in failed:
                        end = rig.manager.turn(OWNER, session_id, turn_id).end
                        assert isinstance(end, TurnFailedEntry)
                        assert (end.code, end.retryable) == ("numerical_error", True)
                    # A turn before the others, or a row that nobody waits for any more.
                    assert len(failed) <= 1
                    rig.assert_recovered()
                    points.strike()


@injects("device error", "every forward is refused once", points=50)
def test_a_refused_launch_is_tried_again_and_loses_nothing(points: Points) -> None:
    for sizes in SIZES:
        with Rig(sizes) as rig:
            for number in range(len(launches(rig))):
                with struck(rig, (number,)):
                    play(rig)
                for name in TURNS:
                    assert_completed(rig, *name)
                rig.assert_recovered()
                points.strike()


@injects("device error", "every forward is refused, and the four behind it", points=50)
def test_a_device_that_keeps_refusing_fails_turns_clearly_and_then_works_again(
    points: Points,
) -> None:
    num_failed = 0
    for sizes in SIZES:
        with Rig(sizes) as rig:
            for number in range(len(launches(rig))):
                with struck(rig, range(number, number + 5)):
                    play(rig)
                for session_id, turn_id in TURNS:
                    end = rig.manager.turn(OWNER, session_id, turn_id).end
                    if isinstance(end, TurnFailedEntry):
                        assert (end.code, end.retryable) == ("device_failed", True)
                        num_failed += 1
                rig.assert_recovered()
                points.strike()
    assert num_failed > 50


@injects("device error", "a turn that no forward survives, from every moment on", points=80)
def test_a_poisonous_turn_dies_alone(points: Points) -> None:
    for sizes in SIZES:
        with Rig(sizes) as rig:
            for _ in at_every_moment(rig, exchange(rig)):
                live = rig.manager._sessions.get(OWNER, "mine").live
                if live is None:
                    rig.assert_recovered()
                    continue
                rig.engine.hand.device.faults.poison_turns.add(live.engine_id)
                rig.submit("mine", BEHIND)
                rig.rest()
                assert_completed(rig, "neighbour", "long")
                assert_completed(rig, "mine", "behind")
                end = rig.manager.turn(OWNER, "mine", "main").end
                assert isinstance(end, TurnCompleted) or (
                    isinstance(end, TurnFailedEntry) and end.code == "device_failed"
                )
                rig.assert_recovered()
                points.strike()


def is_completed(rig: Rig, session_id: str, turn_id: str) -> bool:
    """Whether a turn ended well."""
    return isinstance(rig.manager.turn(OWNER, session_id, turn_id).end, TurnCompleted)
