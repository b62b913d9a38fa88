"""Single turns and short conversations, step by step."""

from __future__ import annotations

import pytest

from session_server.core.events import FinishReason
from tests.engine.bench import Bench
from tests.sim.hand_engine import Sizes


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_a_conversation_says_what_a_lone_replay_says(
    num_in_flight: int, page_size: int, chunk_tokens: int
) -> None:
    bench = Bench(
        Sizes(num_in_flight=num_in_flight, page_size=page_size, chunk_tokens=chunk_tokens)
    )
    session_id = bench.open("s")
    history: tuple[int, ...] = ()
    for turn in range(4):
        name, new = f"t{turn}", tuple(1 + (turn * 7 + i) % 31 for i in range(5 + turn))
        command = bench.submit_command(session_id, name, new, base_len=len(history), max_tokens=6)
        bench.run(command)
        end = bench.finished(name)
        bench.expect(name, history + new)
        assert end.reason is FinishReason.LENGTH
        assert end.prompt_tokens == len(history + new)
        assert end.cached_tokens in ({0} if turn == 0 else {len(history) - 1, len(history)})
        history += (*new, *bench.tokens(name))
        assert end.history_len == len(history)
    bench.close_all()
