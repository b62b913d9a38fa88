"""What a step costs the host, in calls of Python functions: they are the same in every run."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from session_server.bench.harness import SteppedEngine
from session_server.bench.host import decoding_engine
from session_server.core.commands import CancelTurn
from session_server.core.events import StepTokens
from session_server.core.ids import TurnId
from session_server.engine_host.transport import Codec

PAGE_SIZE = 16
"""Steps counted together: each turn begins one page in them."""


def calls_per_step(engine: SteppedEngine) -> float:
    """Count the calls of a decode step, the mean over the steps of a page."""
    engine.step()
    num_calls = 0

    def count(frame: FrameType, kind: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += kind == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(PAGE_SIZE):
            engine.step()
    finally:
        sys.setprofile(before)
    return num_calls / PAGE_SIZE


@pytest.mark.parametrize(("num_running", "most"), [(1, 85), (8, 100), (256, 400)])
def test_a_decode_step_makes_few_calls(num_running: int, most: int) -> None:
    assert calls_per_step(decoding_engine(0, num_running)) <= most


def test_a_further_turn_costs_a_step_next_to_nothing() -> None:
    """Its share of the page that it begins every sixteen steps: sixteen calls."""
    few, many = (calls_per_step(decoding_engine(0, number)) for number in (64, 128))
    assert (many - few) / 64 <= 1.25


def test_idle_sessions_add_no_call_to_a_step() -> None:
    assert calls_per_step(decoding_engine(1000)) <= calls_per_step(decoding_engine(0))


def test_a_step_of_many_turns_is_one_event_in_one_message() -> None:
    engine = decoding_engine(0, 64)
    engine.step()
    events = engine.step()
    assert [type(event) for event in events] == [StepTokens]
    assert len(list(Codec().event_frames(events))) == 1


def test_a_group_goes_on_after_a_turn_has_left_it() -> None:
    engine = decoding_engine(0, 3)
    engine.step()
    engine.step([CancelTurn(turn_id=TurnId("t2"), num_outputs=None)])
    (tokens,) = (event for event in engine.step() if isinstance(event, StepTokens))
    assert tokens.turn_ids == ("t1", "t3")
    assert calls_per_step(engine) <= 100
