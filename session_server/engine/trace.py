"""`StepTrace`: the last steps of the engine, to find out how the books went wrong.

A record has ids, lengths and decisions, never a token, so showing it reveals no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import starmap
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.types import TurnId
from session_server.core.batch import Batch, DecodeRows, StepResult
from session_server.core.commands import (
    MAX_REPORTED_ROWS,
    MAX_REPORTED_STEPS,
    EngineCommand,
)
from session_server.core.events import TracedRow, TracedStep
from session_server.engine.plan import StepPlan

NUM_STEPS: Final = 1000
"""Steps kept."""

MAX_TRACED: Final = 1 << 16
"""Rows, decisions, commands and results of all steps kept, at up to some 200 bytes each."""

# One call into C for all rows: between two forwards Python code is cold, and costs several times
# what a benchmark of it alone says.
_STEP: Final = attrgetter("step")
_SECONDS: Final = attrgetter("forward_s")
_ROW: Final = attrgetter("turn_id", "row", "start", "num_tokens", "num_drafts", "sample")


class _Columns(NamedTuple):
    """Hold the rows of a forward in which every turn decodes, until somebody wants to see them."""

    turn_ids: tuple[TurnId, ...]
    table_rows: NDArray[np.int32]
    starts: NDArray[np.int32]

    @classmethod
    def of(cls, decoding: DecodeRows) -> _Columns:
        return cls(decoding.turn_ids, decoding.table_rows, decoding.starts)

    def rows(self) -> tuple[TracedRow, ...]:
        columns = zip(self.turn_ids, self.table_rows.tolist(), self.starts.tolist(), strict=True)
        return tuple([TracedRow(name, row, start, 1, 0, True) for name, row, start in columns])


class StepTrace:
    """Keep the last steps within both bounds, and a copy of them from the first violation.

    `num_steps`: steps begun so far.
    """

    def __init__(self) -> None:
        self._ring: deque[TracedStep] = deque()
        self._columns: dict[int, _Columns] = {}
        """By step, the rows of those that are not in their records."""

        self._num_traced = 0
        self._frozen: tuple[TracedStep, ...] = ()
        self._begun: tuple[float, Sequence[EngineCommand], Sequence[StepResult]] | None = None
        self.num_steps = 0

    def begin_step(
        self, now_s: float, commands: Sequence[EngineCommand], results: Sequence[StepResult]
    ) -> None:
        """Begin the record of a step."""
        self.num_steps += 1
        self._begun = now_s, commands, results

    def end_step(self, plan: StepPlan | None, batch: Batch | None) -> None:
        """Complete the record with what the step decided and what it launches."""
        if self._begun is None:
            return  # `freeze` has recorded this step
        now_s, commands, results = self._begun
        self._begun = None
        step = TracedStep(
            step=self.num_steps,
            now_s=now_s,
            commands=tuple(type(command).__name__ for command in commands),
            settled=tuple(map(_STEP, results)),
            forward_s=tuple(map(_SECONDS, results)),
            cooled=plan.cool if plan else (),
            retracted=plan.retract if plan else (),
            admitted=plan.admit if plan else (),
            refused=plan.refuse if plan else None,
            launched=None if batch is None else batch.step,
            is_probe=batch is not None and batch.probe is not None,
            rows=() if batch is None else tuple(starmap(TracedRow, map(_ROW, batch.listed))),
        )
        if batch is not None and batch.decoding is not None:
            self._columns[step.step] = _Columns.of(batch.decoding)
        self._ring.append(step)
        self._num_traced += self._size(step)
        while self._num_traced > MAX_TRACED or len(self._ring) > NUM_STEPS:
            dropped = self._ring.popleft()
            self._num_traced -= self._size(dropped)
            self._columns.pop(dropped.step, None)

    def freeze(self) -> None:
        """Keep the steps up to now. Only the first call counts, since it shows the cause."""
        if self._frozen:
            return
        self.end_step(None, None)
        self._frozen = tuple(map(self._with_rows, self._ring))

    def frozen(self, num_steps: int = NUM_STEPS) -> tuple[TracedStep, ...]:
        """Return the last steps before the first violation, oldest first; none without one."""
        return self._frozen[-num_steps:]

    def recent(self, after: int) -> tuple[TracedStep, ...]:
        """Return the newest steps after this one that launched or settled a forward, oldest first;
        at most `MAX_REPORTED_STEPS`, with at most `MAX_REPORTED_ROWS` rows in all."""
        found: list[TracedStep] = []
        num_rows = 0
        for record in reversed(self._ring):
            step = self._with_rows(record)
            num_rows += len(step.rows)
            is_full = len(found) == MAX_REPORTED_STEPS or num_rows > MAX_REPORTED_ROWS
            if step.step <= after or is_full:
                break
            if step.settled or step.launched is not None:
                found.append(step)
        return tuple(reversed(found))

    def _with_rows(self, step: TracedStep) -> TracedStep:
        """Return the record of a step with its rows."""
        columns = self._columns.get(step.step)
        return step if columns is None else msgspec.structs.replace(step, rows=columns.rows())

    def _size(self, step: TracedStep) -> int:
        decisions = len(step.cooled) + len(step.retracted) + len(step.admitted)
        columns = self._columns.get(step.step)
        num_rows = len(step.rows) if columns is None else len(columns.turn_ids)
        return num_rows + decisions + len(step.commands) + len(step.settled)
