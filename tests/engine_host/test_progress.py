"""For how long an engine has completed no step, and whether that is too long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from session_server.core.batch import Batch, Probe, StepResult
from session_server.engine_host.progress import (
    FIRST_FORWARD_LIMIT_S,
    RECOUNT_LIMIT_S,
    STALL_RATIO,
    STEP_LIMIT_S,
    ForwardSize,
    ForwardTimes,
    Progress,
)


def batch(*spans: tuple[int, int]) -> Batch:
    """A forward over (start, num_tokens) of each row."""
    rows = [SimpleNamespace(start=start, num_tokens=num_tokens) for start, num_tokens in spans]
    return cast(Batch, SimpleNamespace(listed=rows, decoding=None, probe=None))


DECODE, CHUNK = batch((100, 1)), batch((100, 512))


def after(*forwards: tuple[Batch, float]) -> tuple[Progress, float]:
    """An engine that has computed these forwards, with its time."""
    progress, now_s = Progress(), 0.0
    for number, (of, took_s) in enumerate(forwards):
        progress.begin_forward(of, now_s)
        now_s += took_s
        progress.end_forward(StepResult(number, (), took_s), now_s)
    return progress, now_s


def has_stalled(progress: Progress, now_s: float) -> bool:
    return progress.pulse(now_s).stalled_s > 0


def test_an_engine_at_rest_has_not_stalled_however_long_it_rests() -> None:
    progress = Progress()
    assert not has_stalled(progress, 1e6)
    progress.begin_step(1e6, is_recount=False)
    progress.end_step(1e6)
    progress.wait(has_work=False)
    assert not has_stalled(progress, 2e6)


def test_a_forward_that_is_usually_quick_has_stalled_after_the_least_limit() -> None:
    progress, now_s = after((DECODE, 0.01))
    progress.begin_forward(DECODE, now_s)
    assert not has_stalled(progress, now_s + STEP_LIMIT_S)
    assert progress.pulse(now_s + STEP_LIMIT_S + 0.1).stalled_s == pytest.approx(STEP_LIMIT_S + 0.1)
    progress.end_forward(StepResult(2, (), 1.7), now_s + 1.7)
    assert not has_stalled(progress, now_s + 100.0)


def test_a_machine_whose_steps_take_long_is_given_several_times_as_long() -> None:
    progress, now_s = after((DECODE, 2.0))
    progress.begin_forward(DECODE, now_s)
    assert not has_stalled(progress, now_s + STALL_RATIO * 2.0)
    assert has_stalled(progress, now_s + STALL_RATIO * 2.0 + 0.1)


def test_a_forward_larger_than_any_before_may_take_longer_in_proportion() -> None:
    progress, now_s = after((DECODE, 0.1))
    progress.begin_forward(CHUNK, now_s)
    num_read = (512 * 612) / 101
    assert not has_stalled(progress, now_s + STALL_RATIO * 0.1 * num_read)
    assert has_stalled(progress, now_s + STALL_RATIO * 0.1 * num_read + 0.1)


def test_the_first_forward_may_take_as_long_as_any_machine_needs() -> None:
    progress = Progress()
    progress.begin_forward(CHUNK, 0.0)
    assert not has_stalled(progress, FIRST_FORWARD_LIMIT_S)
    assert has_stalled(progress, FIRST_FORWARD_LIMIT_S + 0.1)


def test_a_forward_behind_another_one_counts_from_the_end_of_that() -> None:
    progress, now_s = after((DECODE, 0.01))
    progress.begin_forward(DECODE, now_s)
    progress.begin_forward(DECODE, now_s)
    progress.end_forward(StepResult(2, (), 0.01), now_s + 1.0)
    assert not has_stalled(progress, now_s + 1.0 + STEP_LIMIT_S)
    assert has_stalled(progress, now_s + 1.0 + STEP_LIMIT_S + 0.1)


def test_a_forward_that_failed_teaches_nothing_about_time() -> None:
    progress = Progress()
    progress.begin_forward(CHUNK, 0.0)
    progress.end_forward(StepResult(1, (), 0.0, error="out of memory"), 1.0)
    progress.begin_forward(CHUNK, 1.0)
    assert not has_stalled(progress, 1.0 + FIRST_FORWARD_LIMIT_S)


def test_a_slow_forward_is_forgotten_while_others_of_its_size_are_quick() -> None:
    times, size = ForwardTimes(), ForwardSize.of(DECODE)
    times.note(size, 10.0)
    for _ in range(80):
        times.note(size, 0.01)
    assert times.expected_s(size) == pytest.approx(0.01)
    assert times.expected_s(ForwardSize.of(CHUNK)) is not None


def test_a_probe_has_a_size_too() -> None:
    probe = Probe(row=None, start=48, tokens=range(16))  # type: ignore[arg-type]
    assert ForwardSize.of(Batch(1, (), (), probe)) == ForwardSize(16, 16 * 64)


def test_a_loop_that_does_not_come_back_from_a_step_has_stalled() -> None:
    progress = Progress()
    progress.begin_step(10.0, is_recount=False)
    assert not has_stalled(progress, 10.0 + STEP_LIMIT_S)
    assert has_stalled(progress, 10.0 + STEP_LIMIT_S + 0.1)
    progress.end_step(20.0)
    progress.begin_step(20.0, is_recount=False)
    assert not has_stalled(progress, 20.0 + STALL_RATIO * 10.0), "its steps take long"


def test_a_recount_on_demand_may_take_its_time() -> None:
    progress = Progress()
    progress.begin_step(10.0, is_recount=True)
    assert not has_stalled(progress, 10.0 + RECOUNT_LIMIT_S)
    assert has_stalled(progress, 10.0 + RECOUNT_LIMIT_S + 0.1)


def test_a_loop_that_waits_with_turns_and_nothing_in_flight_has_stalled() -> None:
    """Nothing will ever wake it: the turns wait for a forward that nobody launches."""
    progress = Progress()
    progress.begin_step(10.0, is_recount=False)
    progress.end_step(10.0)
    progress.wait(has_work=True)
    assert has_stalled(progress, 10.0 + STEP_LIMIT_S + 0.1)
    progress.begin_forward(DECODE, 12.0)
    progress.wait(has_work=True)
    assert not has_stalled(progress, 12.0 + STEP_LIMIT_S)
