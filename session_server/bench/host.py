"""Measure B5: the engine's own cost, without a model: by running turns, idle sessions, history.

The real engine and cache run with a device that answers at once, so that only host work is timed.
Variants are interleaved, round by round, and compared by their medians, so that a machine whose
speed drifts affects them alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from cache.spec import CacheSpec, Capacity, LayerGroup, LayerKind
from cache.types import PoolName
from session_server.bench.harness import SteppedEngine, take_turns
from session_server.bench.sheet import Sheet
from session_server.core.batch import Batch, RowResult, StepResult
from session_server.core.commands import CancelTurn
from session_server.core.ids import SessionId
from session_server.engine.config import MemoryPolicy

RUNNING_COUNTS: Final = (1, 8, 64, 256)
IDLE_COUNTS: Final = (0, 1000, 10_000)
HISTORIES: Final = (0, 8192)
NUM_RUNNING: Final = 8
STEPS_PER_ROUND: Final = 100
NUM_ROUNDS: Final = 40
NUM_ADMISSIONS: Final = 300
TOTAL_STEPS: Final = NUM_ROUNDS * len(RUNNING_COUNTS + IDLE_COUNTS) + NUM_ADMISSIONS * len(
    HISTORIES
)
_PAGE_SIZE: Final = 16
_CONTEXT_LEN: Final = 16_384
_MAX_STEPS: Final = 2 * NUM_ROUNDS * STEPS_PER_ROUND
_IDLE_TOKENS: Final = 48
_NEW_TOKENS: Final = 16
_OUTPUT: Final = RowResult((7,), (), (), finite=True)
_NOTHING: Final = RowResult((), (), (), finite=True)
_ADMITTED: Final = SessionId("admitted")


def measure_running(counts: Sequence[int], *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Measure host microseconds of a decode step by the number of running turns."""
    measures = {count: partial(_median_step_us, decoding_engine(0, count)) for count in counts}
    return _ratios(take_turns(measures, NUM_ROUNDS, on_step))


def measure_idle_sessions(counts: Sequence[int], *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Measure host microseconds of a decode step of `NUM_RUNNING` turns beside idle sessions."""
    measures = {count: partial(_median_step_us, decoding_engine(count)) for count in counts}
    return _ratios(take_turns(measures, NUM_ROUNDS, on_step))


def measure_admission(histories: Sequence[int], *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Measure host microseconds of the step that admits a turn, by length of the history."""
    measures = {n: partial(_admission_us, _parked_engine(n), n) for n in histories}
    return _ratios(take_turns(measures, NUM_ADMISSIONS, on_step))


_COLUMNS: Final = {"us": "{median_us:.1f}", "ratio to the first": "{ratio:.3f}"}
SHEETS: Final = (
    Sheet(
        "engine host time of a decode step, by running turns",
        lambda report: report["running"],
        ("",),
        _COLUMNS,
    ),
    Sheet(
        "engine host time of a decode step, by idle sessions",
        lambda report: report["idle_sessions"],
        ("",),
        _COLUMNS,
    ),
    Sheet(
        "engine host time of admitting a turn, by history",
        lambda report: report["admission"],
        ("",),
        _COLUMNS,
    ),
)


def decoding_engine(num_idle: int, num_running: int = NUM_RUNNING) -> SteppedEngine:
    """Return an engine with so many turns that decode, beside idle sessions; enough pages for all
    the steps of a measurement."""
    engine = _engine(num_idle + num_running, num_idle * 64 + num_running * _MAX_STEPS)
    engine.park([SessionId(f"idle{number}") for number in range(num_idle)], _IDLE_TOKENS)
    running = [SessionId(f"run{number}") for number in range(num_running)]
    engine.park(running, 0)
    for session_id in running:
        engine.step([engine.turn(session_id, 0, 64, _CONTEXT_LEN)])
    return engine


def _engine(num_sessions: int, num_tokens: int) -> SteppedEngine:
    group = LayerGroup(PoolName("full"), LayerKind.FULL, (0,), 1, 8, 4)
    num_pages = {group.pool: num_tokens // _PAGE_SIZE + 2 * num_sessions + 64}
    capacity = Capacity(MappingProxyType(num_pages), num_sessions, _CONTEXT_LEN)
    # There is no content that a probe could check.
    memory = MemoryPolicy(probe_interval_s=math.inf)
    return SteppedEngine(
        CacheSpec((group,), _PAGE_SIZE),
        capacity,
        forward=_answer,
        chunk_tokens=_CONTEXT_LEN,
        memory=memory,
        max_running=max(RUNNING_COUNTS),
    )


def _parked_engine(history: int) -> SteppedEngine:
    engine = _engine(1, history + 1024)
    engine.park([_ADMITTED], history)
    return engine


def _median_step_us(engine: SteppedEngine) -> float:
    return statistics.median(engine.timed_step_us() for _ in range(STEPS_PER_ROUND))


def _admission_us(engine: SteppedEngine, history: int) -> float:
    """Submit a turn, time the step that launches its first forward, and cancel it."""
    turn = engine.turn(_ADMITTED, history, _NEW_TOKENS, 64)
    elapsed_us = engine.timed_step_us([turn])
    engine.settle([CancelTurn(turn_id=turn.turn_id, num_outputs=None)])
    return elapsed_us


def _answer(batch: Batch) -> StepResult:
    if batch.decoding is not None:
        tokens = _OUTPUT.token_ids * len(batch.decoding)
        return StepResult(batch.step, (), forward_s=0.0, tokens=tokens)
    rows = tuple(_OUTPUT if row.sample else _NOTHING for row in batch.rows)
    return StepResult(batch.step, rows, forward_s=0.0)


def _ratios(times: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    medians = {size: statistics.median(values) for size, values in times.items()}
    first = next(iter(medians.values()))
    return {
        str(size): {"median_us": median, "ratio": median / first}
        for size, median in medians.items()
    }
