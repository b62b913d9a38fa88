"""Retract the youngest running turn every so many forwards, in tests.

Without this switch a turn is retracted only when pages are short, which needs a pool of just the
right size. SGLang has the same switch (`SGLANG_TEST_RETRACT`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cache.types import TurnId
from session_server.engine.plan import StepPlan


def force_retraction(plan: StepPlan, running: Sequence[TurnId]) -> StepPlan:
    """Return `plan` with the youngest of the `running` turns retracted; the oldest comes first.

    Returns `plan` itself where that turn runs alone or is the only one with work, because the
    oldest turn must always go on, and where `plan` retracts a turn anyway.
    """
    if len(running) < 2 or plan.retract:
        return plan
    youngest = running[-1]
    work = tuple(work for work in plan.work if work.turn_id != youngest)
    if not work:
        return plan
    return msgspec.structs.replace(plan, retract=(youngest,), work=work)
