"""What an agent's loop costs is what is new in it, whatever the model and the template remember."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.loops import NAMINGS, Thinking, excess, served, work
from tests.depth import at_depth

NUM_AGENTS, NUM_CALLS = at_depth((2, 6), proof=(4, 40))
USUAL = [("full and recurrent", "dropped")]


@pytest.mark.parametrize(
    ("layout", "thinking"), at_depth(USUAL, proof=[*USUAL, ("full and windows", "kept")])
)
def test_a_loop_computes_new_tokens_only(layout: str, thinking: Thinking, tmp_path: Path) -> None:
    with served(layout, thinking, tmp_path) as server:
        for naming in NAMINGS:
            agents = work(server, thinking, naming, num_agents=NUM_AGENTS, num_calls=NUM_CALLS)
            assert all(excess(agent) <= 0 for agent in agents), agents
