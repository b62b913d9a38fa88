"""Whether an engine makes progress, seen from outside."""

from __future__ import annotations

import pytest

from cache.types import SessionId, TurnId
from session_server.core.commands import SubmitTurn
from session_server.core.events import (
    EngineEvent,
    EnginePulse,
    EngineResumed,
    EngineStalled,
    PrefillProgressed,
    SessionGone,
)
from session_server.core.sampling import SamplingParams
from session_server.engine_host.watchdog import PULSE_INTERVAL_S, SILENCE_LIMIT_S, Watchdog

MOVED = PrefillProgressed(turn_id=TurnId("t"), computed=1, total=2)
NUM_SILENT = int(SILENCE_LIMIT_S / PULSE_INTERVAL_S)


class Heard:
    """A watchdog, and what it told the server."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.watchdog = Watchdog(self.events.append)

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.watchdog.tick(PULSE_INTERVAL_S)

    def take(self) -> list[EngineEvent]:
        told, self.events[:] = list(self.events), []
        return told


def test_silence_is_a_stall_after_its_limit_and_any_word_ends_it() -> None:
    heard = Heard()
    heard.watchdog.note_event(EnginePulse(stalled_s=0.0))
    heard.tick(1 + NUM_SILENT - 1)
    assert heard.take() == []
    heard.tick()
    assert heard.take() == [EngineStalled(stalled_s=SILENCE_LIMIT_S)]
    heard.tick(100)
    assert heard.take() == [], "told once"
    heard.watchdog.note_event(EnginePulse(stalled_s=0.0))
    assert heard.take() == [EngineResumed()]


def test_an_engine_that_speaks_is_not_silent() -> None:
    heard = Heard()
    for _ in range(100):
        heard.watchdog.note_event(SessionGone(session_id=SessionId("s")))
        heard.tick()
    assert heard.take() == []


def test_an_engine_that_says_it_has_stalled_is_believed_until_a_turn_moves() -> None:
    heard = Heard()
    heard.watchdog.note_event(EnginePulse(stalled_s=1.6))
    assert heard.take() == [EngineStalled(stalled_s=1.6)]
    heard.watchdog.note_event(SessionGone(session_id=SessionId("s")))
    heard.watchdog.note_event(EnginePulse(stalled_s=1.9))
    assert heard.take() == [], "an answer is no step"
    heard.watchdog.note_event(MOVED)
    assert heard.take() == [EngineResumed()]


def test_a_silent_engine_that_speaks_again_must_also_complete_a_step() -> None:
    heard = Heard()
    heard.tick(NUM_SILENT)
    assert heard.take() == [EngineStalled(stalled_s=SILENCE_LIMIT_S)]
    heard.watchdog.note_event(EnginePulse(stalled_s=60.0))
    assert heard.take() == []
    heard.watchdog.note_event(EnginePulse(stalled_s=0.0))
    assert heard.take() == [EngineResumed()]


@pytest.mark.parametrize("moves", [False, True])
def test_an_engine_hangs_that_has_turns_and_moves_none(moves: bool) -> None:
    heard = Heard()
    submit = SubmitTurn(
        session_id=SessionId("s"),
        turn_id=TurnId("t"),
        base_len=0,
        tokens=(1,),
        sampling=SamplingParams(),
    )
    heard.tick(100)
    assert heard.watchdog.no_progress_s == 0.0, "it has no turn"
    heard.watchdog.note_command(submit)
    for _ in range(8):
        heard.watchdog.note_event(MOVED if moves else EnginePulse(stalled_s=0.0))
        heard.tick()
    assert heard.watchdog.no_progress_s == (0.0 if moves else 8 * PULSE_INTERVAL_S)
