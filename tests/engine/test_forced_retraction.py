"""The switch that retracts the youngest running turn every so many forwards."""

from __future__ import annotations

import pytest

from session_server.core.events import TurnFinished
from tests.engine.bench import Bench
from tests.scenarios.lines import distinct
from tests.sim.hand_engine import Sizes

NAMES = ("a", "b", "c", "d")


def crowd(sizes: Sizes, max_tokens: int = 12) -> Bench:
    """Run four turns, sent in one step, to their ends."""
    bench = Bench(sizes)
    sessions = [bench.open(f"of {name}") for name in NAMES]
    bench.run(
        *(
            bench.submit_command(session, name, distinct(i, 9), max_tokens=max_tokens)
            for i, (session, name) in enumerate(zip(sessions, NAMES, strict=True))
        )
    )
    return bench


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("interval", [1, 2, 5])
def test_turns_retracted_by_force_say_what_each_would_say_alone(
    interval: int, num_in_flight: int
) -> None:
    sizes = Sizes(retract_interval=interval, num_in_flight=num_in_flight, num_drafts=2)
    bench = crowd(sizes)
    for i, name in enumerate(NAMES):
        assert bench.finished(name).num_outputs == 12
        bench.expect(name, distinct(i, 9))
    assert bench.finished("a").num_retractions == 0, "the oldest always goes on"
    assert bench.finished("d").num_retractions > 0
    bench.close_all()


def test_nobody_is_retracted_when_the_switch_is_off() -> None:
    assert crowd(Sizes()).engine.counters.retractions == 0


def test_a_turn_that_runs_alone_is_not_retracted() -> None:
    bench = Bench(Sizes(retract_interval=1))
    bench.run(bench.submit_command(bench.open("s"), "t", distinct(1, 9), max_tokens=12))
    assert bench.engine.counters.retractions == 0
    bench.expect("t", distinct(1, 9))


def test_the_switch_works_once_in_every_interval() -> None:
    """Two of four turns run at a time. After forward 8 the younger one is only just admitted."""
    bench = crowd(Sizes(retract_interval=4, num_in_flight=1, max_running=2, chunk_tokens=64), 7)
    together = [batch.step for batch in bench.batches if len(batch.rows) == 2]
    alone = [batch.step for batch in bench.batches if len(batch.rows) == 1]
    assert [step - 1 for step in alone if step <= max(together)] == [4, 12]


def test_turns_sent_in_one_step_keep_their_order_when_one_of_them_is_retracted() -> None:
    bench = crowd(Sizes(retract_interval=4, max_running=2, chunk_tokens=64))
    assert bench.finished("b").num_retractions > 0
    ends = [event.turn_id for event in bench.events if isinstance(event, TurnFinished)]
    assert ends == list(NAMES)
