"""What the runner's sampler is told when a turn is admitted, and admitted again."""

from __future__ import annotations

import numpy as np
import pytest

from cache.types import RowId
from session_server.core.batch import SamplingStart
from session_server.engine.context import Outbox
from tests.engine.bench import Bench
from tests.sim.hand_engine import Sizes

PROMPT_LEN = 18


def starts_of_a_retracted_turn(**sampling: object) -> tuple[list[SamplingStart], list[int]]:
    """Every start sent for a turn that is retracted in mid-decode, and its outputs."""
    bench = Bench(Sizes(num_pages=14, chunk_tokens=64))
    old, young = bench.open("old"), bench.open("young")
    bench.run(
        bench.submit_command(old, "a", tuple(range(1, 18)), max_tokens=30),
        bench.submit_command(young, "b", tuple(range(30, 12, -1)), max_tokens=20, **sampling),
    )
    rows = [row for batch in bench.batches for row in batch.rows if row.turn_id == "b"]
    starts = [row.sampling for row in rows if row.sampling is not None]
    assert len(starts) == 1 + bench.finished("b").num_retractions > 1
    return starts, bench.tokens("b")


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_the_first_output_keeps_its_position_when_a_turn_starts_again(penalty: float) -> None:
    """Else a retracted turn would hold stop tokens back for `min_tokens` more tokens."""
    starts, _ = starts_of_a_retracted_turn(min_tokens=3, presence_penalty=penalty)
    assert [start.prompt_len for start in starts] == [PROMPT_LEN] * len(starts)


def test_penalties_see_the_prompt_as_context_and_what_was_said_as_output() -> None:
    starts, outputs = starts_of_a_retracted_turn(frequency_penalty=0.5)
    for start in starts:
        assert np.array_equal(start.context, range(30, 12, -1))
        assert start.outputs.tolist() == outputs[: len(start.outputs)]
    assert len(starts[0].outputs) == 0 < len(starts[-1].outputs)


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("interval", [0, 3])
def test_rows_have_a_sampler_only_while_their_turn_runs(interval: int, num_in_flight: int) -> None:
    """Every session keeps its row while it is at rest; a turn may be retracted in between."""
    bench = Bench(Sizes(num_in_flight=num_in_flight, retract_interval=interval, max_running=3))
    said = {bench.open(f"s{index}"): tuple[int, ...]() for index in range(7)}
    most = 0
    for part in range(3):
        for index, (session, before) in enumerate(said.items()):
            tokens = tuple(range(index, 9)) if part == 0 else (5, part)
            bench.step(
                bench.submit_command(
                    session,
                    f"{session}.{part}",
                    tokens,
                    base_len=len(before),
                    max_tokens=7,
                    frequency_penalty=0.5,
                )
            )
            said[session] = (*before, *tokens)
        outcome = bench.step()
        while len(bench.runner) or not outcome.is_blocked:
            outcome = bench.settle() if outcome.is_blocked else bench.step()
            most = max(most, bench.runner.num_samplers)
        for session, prompt in said.items():
            bench.expect(f"{session}.{part}", prompt)
            said[session] = (*prompt, *bench.tokens(f"{session}.{part}"))
    assert most == 3, "of as many as may run"
    assert len({row.row for batch in bench.batches for row in batch.rows}) == 7
    assert (bench.engine.counters.retractions > 0) == (interval > 0)
    bench.close_all()


def test_the_runner_hears_of_an_end_however_late_it_is_launched_again() -> None:
    bench = Bench(Sizes())
    bench.run(bench.submit_command(bench.open("s"), "a", (1, 2, 3)))
    assert bench.runner.num_samplers == 1, "nothing was launched since"
    bench.run(bench.submit_command(bench.open("other"), "b", (4, 5, 6)))
    row = bench.batches[0].rows[0].row
    assert [batch.ended for batch in bench.batches if batch.ended] == [(row,)]
    assert bench.runner.num_samplers == 1


def test_a_row_is_told_once_however_many_of_its_turns_end_before_the_next_launch() -> None:
    outbox = Outbox()
    for row in (3, 1, 3, 3):
        outbox.end(RowId(row))
    assert outbox.take_changes() == ((), (3, 1))
    assert outbox.take_changes() == ((), ())
