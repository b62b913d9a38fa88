"""Draws docs/assets/fairness.png: what long prompts do to the first tokens of short turns.

    python -m tests.engine.draw_fairness docs/assets/fairness.png

The engine as it is, beside the engine with its two rules taken away: tokens go to whoever came
first, and nobody passes a turn that waits for pages. Counted in forwards, so no machine matters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from session_server.engine import plan_admission
from session_server.engine.config import MemoryCheck
from tests.engine.crowd import Coming, Crowd
from tests.mutants.guards import FIRST_COME_TAKES_ALL
from tests.sim.hand_engine import Sizes

HOG_LENS = (0, 250, 500, 1000, 1500, 2000, 3000, 4000)
NUM_HOGS = range(7)
SHORT = {f"t{i}": Coming(8, max_new=4) for i in range(16)}


def worst_first_token(hogs: dict[str, Coming], *, num_pages: int, max_context_len: int) -> int:
    """Forwards until the last of 16 short turns behind some hogs has its first token."""
    stage = Sizes(
        num_pages=num_pages,
        num_rows=64,
        max_context_len=max_context_len,
        chunk_tokens=64,
        max_running=32,
        memory_check=MemoryCheck.WARN,
    )
    crowd = Crowd(stage)
    if hogs:
        crowd.arrive(hogs)
    crowd.arrive(SHORT)
    crowd.finish()
    return max(map(crowd.num_forwards, SHORT))


def beside_one(hog_len: int) -> int:
    """Memory for all; one prompt of this length came before them."""
    hogs = {"hog": Coming(hog_len)} if hog_len else {}
    return worst_first_token(hogs, num_pages=2000, max_context_len=4096)


def behind_some(num_hogs: int) -> int:
    """Memory for one hog at a time, and this many came before them."""
    hogs = {f"hog{i}": Coming(700, max_new=20) for i in range(num_hogs)}
    return worst_first_token(hogs, num_pages=300, max_context_len=1200)


def main(path: Path) -> None:
    """Play and draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    length, number = figure.subplots(1, 2, sharey=True)
    for label, is_fair in (("first come, first served", False), ("as it is", True)):
        rules = nullcontext() if is_fair else FIRST_COME_TAKES_ALL.apply()
        passing = patch.object(
            plan_admission, "MAX_BYPASSES", plan_admission.MAX_BYPASSES if is_fair else 0
        )
        with rules, passing:
            for axes, values, play in (
                (length, HOG_LENS, beside_one),
                (number, NUM_HOGS, behind_some),
            ):
                axes.plot(values, _all(play, values), marker="o", markersize=3, label=label)
    length.set(xlabel="tokens of the long prompt", ylabel="forwards to the last first token")
    number.set(xlabel="long prompts that do not fit together")
    for axes in (length, number):
        axes.set_yscale("log")
        axes.legend()
    figure.suptitle("16 short turns, 8 tokens each, 64 tokens per forward")
    figure.savefig(path, dpi=130)


def _all(play: Callable[[int], int], values: tuple[int, ...] | range) -> list[int]:
    said = [play(value) for value in values]
    print(play.__name__, dict(zip(values, said, strict=True)))
    return said


if __name__ == "__main__":
    main(Path(sys.argv[1]))
