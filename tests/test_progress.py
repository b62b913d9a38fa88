"""Long work says how far it is, also where nobody draws a bar."""

from __future__ import annotations

import io

from rich.console import Console

from session_server.progress import LINE_INTERVAL_S, StepProgress


def test_a_pipe_gets_a_line_at_the_start_and_then_now_and_then() -> None:
    now_s = 100.0
    out = io.StringIO()
    with StepProgress(Console(file=out), clock=lambda: now_s) as progress:
        task = progress.add_task("turns", total=63)
        for _ in range(10):
            progress.advance(task)
        now_s += LINE_INTERVAL_S
        progress.advance(task, 2)
        progress.advance(task)
        rounds = progress.add_task("rounds", total=None)
        now_s += LINE_INTERVAL_S
        progress.advance(rounds)  # of so many nobody knows
    assert out.getvalue().splitlines() == [
        "turns: 0 of 63, 0 s",
        "turns: 12 of 63, 5 s",
        "rounds: 1, 10 s",
    ]


def test_a_terminal_gets_a_bar_instead() -> None:
    out = io.StringIO()
    with StepProgress(Console(file=out, force_terminal=True, width=80)) as progress:
        progress.advance(progress.add_task("turns", total=2), 2)
    assert "2/2" in out.getvalue()
    assert "turns: " not in out.getvalue()
