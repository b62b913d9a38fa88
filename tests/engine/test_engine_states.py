"""A row comes with all the states that its turns may hold, whatever happens to their forwards."""

from __future__ import annotations

import pytest

from session_server.core.commands import CloseSession
from tests.engine.bench import Bench
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers, Mixture

NUM_ROWS = 3
LAYERS = Layers(Mixture.FULL_AND_RECURRENT)
PREFIX = tuple(1 + k * 7 % 11 for k in range(14))
REST = tuple(1 + k * 5 % 13 for k in range(250))


@pytest.mark.parametrize("chunk_tokens", range(50, 70, 3))
def test_a_failed_forward_leaves_room_for_its_retry_in_every_row(chunk_tokens: int) -> None:
    """Every row has a prompt of several chunks: two are in flight when the first fails, and each
    goes on from a snapshot of somebody else's behind the length that its session rested at."""
    bench = Bench(
        Sizes(
            layers=LAYERS,
            num_pages=1024,
            num_rows=NUM_ROWS,
            max_context_len=1024,
            chunk_tokens=chunk_tokens,
        )
    )
    for index in range(NUM_ROWS):
        other = bench.open(f"other {index}")
        bench.run(bench.submit_command(other, f"before {index}", first(index), max_tokens=2))
        bench.run(bench.submit_command(other, f"prefix {index}", PREFIX, base_len=7, max_tokens=1))
        bench.run(CloseSession(session_id=other))
    turns = []
    for index in range(NUM_ROWS):
        session = bench.open(f"session {index}")
        bench.run(bench.submit_command(session, f"short {index}", first(index), max_tokens=2))
        turns.append(
            bench.submit_command(session, f"long {index}", PREFIX + REST, base_len=7, max_tokens=1)
        )
    bench.step(*turns)
    bench.step()
    bench.settle()
    assert len(bench.runner) == 2
    bench.runner.faults.fail_steps.add(bench.batches[-2].step)
    bench.run()
    for index in range(NUM_ROWS):
        assert len(bench.tokens(f"long {index}")) == 1
    assert bench.engine.counters.shortfalls == 0
    bench.close_all()


def first(index: int) -> tuple[int, ...]:
    return tuple(range(index + 1, index + 6))
