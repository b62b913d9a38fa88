"""`StepTrace`: the last steps of the engine, to find out how the books went wrong.

A record is a few references and small tuples: ids, lengths and decisions, never a token. Keeping it
costs about a microsecond, and showing it reveals no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import msgspec

from cache.types import TurnId
from session_server.core.batch import Batch, StepResult
from session_server.core.commands import EngineCommand
from session_server.core.events import TracedRow, TracedStep
from session_server.engine.plan import StepPlan

NUM_STEPS: Final = 1000
"""Steps kept."""

# One call into C for all rows: between two forwards Python code is cold, and costs several times
# what a benchmark of it alone says.
_STEP: Final = attrgetter("step")
_ROW: Final = attrgetter("turn_id", "row", "start", "num_tokens")


class _Record(msgspec.Struct, frozen=True, gc=False):
    step: int
    now_s: float
    commands: tuple[type[EngineCommand], ...]
    settled: tuple[int, ...]
    plan: StepPlan | None
    launched: int | None
    is_probe: bool
    rows: tuple[tuple[TurnId, int, int, int], ...]


class StepTrace:
    """Keep the last `NUM_STEPS` records, and a copy of them from the first violation.

    `num_steps`: steps begun so far.
    """

    def __init__(self) -> None:
        self._ring: deque[_Record] = deque(maxlen=NUM_STEPS)
        self._frozen: tuple[_Record, ...] = ()
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
        self._ring.append(
            _Record(
                self.num_steps,
                now_s,
                tuple(map(type, commands)),
                tuple(map(_STEP, results)),
                plan,
                None if batch is None else batch.step,
                batch is not None and batch.probe is not None,
                () if batch is None else tuple(map(_ROW, batch.rows)),
            )
        )

    def freeze(self) -> None:
        """Keep the steps up to now. Only the first call counts, since it shows the cause."""
        if self._frozen:
            return
        self.end_step(None, None)
        self._frozen = tuple(self._ring)

    def frozen(self, num_steps: int = NUM_STEPS) -> tuple[TracedStep, ...]:
        """Return the last steps before the first violation, oldest first; none without one."""
        return tuple(_show(record) for record in self._frozen[-num_steps:])


def _show(record: _Record) -> TracedStep:
    plan = record.plan
    return TracedStep(
        step=record.step,
        now_s=record.now_s,
        commands=tuple(kind.__name__ for kind in record.commands),
        settled=record.settled,
        launched=record.launched,
        is_probe=record.is_probe,
        rows=tuple(TracedRow(*row) for row in record.rows),
        cooled=plan.cool if plan else (),
        retracted=plan.retract if plan else (),
        admitted=plan.admit if plan else (),
        refused=plan.refuse if plan else None,
    )
