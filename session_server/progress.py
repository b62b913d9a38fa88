"""Show the progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

LINE_INTERVAL_S: Final = 5.0
"""Minimum seconds between two lines in a pipe or a file."""


class StepProgress:
    """Count steps of tasks, as a context manager that removes the bar at the end."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console)
        self._console = console
        self._clock = clock
        self._started_s = self._printed_s = clock()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def add_task(self, description: str, *, total: float | None) -> TaskID:
        """Start counting a task; `total` is None if it is unknown."""
        task = self._bars.add_task(description, total=total)
        if total is not None:  # of others a line says nothing until something is counted
            self._print_line(task)
        return task

    def advance(self, task: TaskID, steps: float = 1) -> None:
        """Count steps of a task."""
        self._bars.advance(task, steps)
        if self._clock() - self._printed_s >= LINE_INTERVAL_S:
            self._print_line(task)

    def _print_line(self, task: TaskID) -> None:
        if self._console.is_terminal:
            return
        self._printed_s = self._clock()
        of = self._bars.tasks[task]
        total = "" if of.total is None else f" of {of.total:.0f}"
        elapsed_s = self._printed_s - self._started_s
        text = f"{of.description}: {of.completed:.0f}{total}, {elapsed_s:.0f} s"
        self._console.print(text, highlight=False, soft_wrap=True)
