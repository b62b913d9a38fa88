"""When the engine's thread recounts memory: never before anybody, and always some time."""

from __future__ import annotations

import itertools

import pytest

from session_server.core.commands import EngineCommand, Shutdown
from session_server.engine.context import Counters
from session_server.engine.engine import StepOutcome
from session_server.engine_host.audit_pace import (
    BUSY_PAUSE_RATIO,
    MAX_AUDIT_DELAY_S,
    REST_DELAY_S,
    AuditPace,
)
from session_server.engine_host.loop import EngineAssembly, EngineLoop


def test_an_audit_begins_after_a_rest() -> None:
    pace = AuditPace(100.0)
    assert pace.wait_s(100.0, 100.0, is_at_rest=True) == REST_DELAY_S
    assert pace.wait_s(100.4, 100.0, is_at_rest=True) == pytest.approx(REST_DELAY_S - 0.4)
    assert pace.wait_s(100.5, 100.0, is_at_rest=True) == 0
    assert pace.wait_s(100.5, 100.3, is_at_rest=True) == pytest.approx(REST_DELAY_S - 0.2)


def test_an_engine_that_never_rests_is_audited_all_the_same() -> None:
    pace = AuditPace(100.0)
    assert pace.wait_s(110.0, 109.99, is_at_rest=False) == MAX_AUDIT_DELAY_S - 10
    late_s = 100.0 + MAX_AUDIT_DELAY_S
    assert pace.wait_s(late_s, late_s - 0.01, is_at_rest=False) == 0
    assert pace.wait_s(late_s, late_s - 0.01, is_at_rest=True) == 0, "short rests delay nothing"


def test_an_audit_under_way_takes_a_twentieth_of_a_busy_thread() -> None:
    pace = AuditPace(0.0)
    pace.note_slice(40.0, 40.001, is_complete=False)
    busy_s = pace.wait_s(40.001, 40.001, is_at_rest=False)
    assert busy_s == pytest.approx(BUSY_PAUSE_RATIO * 0.001)
    assert pace.wait_s(40.001, 40.001, is_at_rest=True) == pytest.approx(0.001)
    assert pace.wait_s(40.03, 40.03, is_at_rest=False) == 0


def test_between_two_audits_passes_fifty_times_what_the_slices_took() -> None:
    pace = AuditPace(0.0)
    pace.note_slice(40.0, 40.01, is_complete=False)
    pace.note_slice(40.1, 40.11, is_complete=True)
    assert pace.wait_s(40.11, 30.0, is_at_rest=True) == pytest.approx(50 * 0.02)
    assert pace.wait_s(40.11, 30.0, is_at_rest=False) == pytest.approx(MAX_AUDIT_DELAY_S)


class EndlessAudit:
    """The audit's part of an engine: it never ends by itself, and counts its slices. After three of
    them a command is in the inbox."""

    is_audit_due = True
    is_at_rest = True
    has_shut_down = False
    due_s = None
    counters = Counters()
    loop: EngineLoop

    def __init__(self) -> None:
        self.num_slices = 0
        self.commands: list[EngineCommand] = []

    def audit_slice(self) -> bool:
        self.num_slices += 1
        if self.num_slices == 3:
            self.loop.post(Shutdown())
        return False

    def step(
        self, now_s: float, commands: list[EngineCommand], *_: object, **__: object
    ) -> StepOutcome:
        self.commands += commands
        self.has_shut_down = True
        return StepOutcome([], None, is_blocked=True)


def test_whoever_comes_waits_for_one_slice() -> None:
    engine, ticks = EndlessAudit(), itertools.count(0, 10)
    loop = EngineLoop(EngineAssembly(engine, None, None), lambda _: None, clock=lambda: next(ticks))
    engine.loop = loop
    loop.run()
    assert engine.commands == [Shutdown()]
    assert engine.num_slices == 3
