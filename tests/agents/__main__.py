"""`python -m tests.agents` lets agents work on models of every layout; it prints what they cost."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from tests.agents.loops import LAYOUTS, NAMINGS, Thinking, excess, served, work

NUM_AGENTS = 4
NUM_CALLS = 40


def main() -> int:
    """Print a table; return 1 if too much was computed somewhere."""
    print(f"{NUM_AGENTS} agents at once, {NUM_CALLS} calls of each")
    print("| layout | thinking is | the call names | new tokens | computed | computed / new |")
    print("|---|---|---|---|---|---|")
    num_over = 0
    thinkings: tuple[Thinking, ...] = get_args(Thinking)
    for layout, thinking in itertools.product(LAYOUTS, thinkings):
        with TemporaryDirectory() as root, served(layout, thinking, Path(root)) as server:
            for naming in NAMINGS:
                agents = work(server, thinking, naming, num_agents=NUM_AGENTS, num_calls=NUM_CALLS)
                num_over += sum(excess(agent) > 0 for agent in agents)
                num_new = sum(agent.num_new for agent in agents)
                computed = sum(agent.num_uncached for agent in agents)
                print(
                    f"| {layout} | {thinking} | {naming} | {num_new:,} | {computed:,} "
                    f"| {computed / num_new:.3f} |",
                    flush=True,
                )
    print(f"{num_over} agents computed more than they may")
    return 1 if num_over else 0


if __name__ == "__main__":
    sys.exit(main())
