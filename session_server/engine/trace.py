"""The last steps of the engine, for whoever has to find out how the books went wrong.

A record is a few references and small tuples: ids, lengths and decisions, never a token, so that
keeping it costs a microsecond and showing it gives no text away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cache.types import TurnId
from session_server.core.batch import Batch, StepResult
from session_server.core.commands import EngineCommand
from session_server.core.events import TracedRow, TracedStep
from session_server.engine.plan import StepPlan

NUM_STEPS: Final = 1000
"""Steps remembered."""


@dataclass(slots=True)
class _Record:
    step: int
    now_s: float
    commands: tuple[str, ...]
    settled: tuple[int, ...]
    plan: StepPlan | None = None
    launched: int | None = None
    is_probe: bool = False
    rows: tuple[tuple[TurnId, int, int, int], ...] = ()


class StepTrace:
    """A ring of `NUM_STEPS` records, and a copy of it from the moment of the first violation."""

    def __init__(self) -> None:
        self._ring: deque[_Record] = deque(maxlen=NUM_STEPS)
        self._frozen: tuple[_Record, ...] = ()
        self._num_steps = 0

    def begin_step(
        self, now_s: float, commands: Sequence[EngineCommand], results: Sequence[StepResult]
    ) -> None:
        """A step has begun."""
        self._num_steps += 1
        kinds = tuple([type(command).__name__ for command in commands])
        settled = tuple([result.step for result in results])
        self._ring.append(_Record(self._num_steps, now_s, kinds, settled))

    def end_step(self, plan: StepPlan | None, batch: Batch | None) -> None:
        """What it has decided and what it launches."""
        record = self._ring[-1]
        record.plan = plan
        if batch is not None:
            record.launched, record.is_probe = batch.step, batch.probe is not None
            record.rows = tuple(
                [(row.turn_id, row.row, row.start, row.num_tokens) for row in batch.rows]
            )

    def freeze(self) -> None:
        """Keep the steps up to now; only the first call counts, since it shows the cause."""
        self._frozen = self._frozen or tuple(self._ring)

    def frozen(self, num_steps: int = NUM_STEPS) -> tuple[TracedStep, ...]:
        """The last steps before the first violation, oldest first; nothing without one."""
        return tuple(_show(record) for record in self._frozen[-num_steps:])


def _show(record: _Record) -> TracedStep:
    plan = record.plan
    return TracedStep(
        step=record.step,
        now_s=record.now_s,
        commands=record.commands,
        settled=record.settled,
        launched=record.launched,
        is_probe=record.is_probe,
        rows=tuple(TracedRow(*row) for row in record.rows),
        cooled=plan.cool if plan else (),
        retracted=plan.retract if plan else (),
        admitted=plan.admit if plan else (),
        refused=plan.refuse if plan else None,
    )
