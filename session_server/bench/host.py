"""Measure B5: the engine's own cost, without a model, with idle sessions and long histories.

The real engine and cache run with a device that answers at once, so that only host work is timed.
Variants are interleaved, round by round, and compared by their medians, so that a machine whose
speed drifts affects them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from cache.session_cache import SessionAwareCache
from cache.spec import CacheSpec, Capacity, LayerGroup, LayerKind
from cache.types import PoolName
from session_server.core.batch import Batch, RowResult, StepResult
from session_server.core.commands import CancelTurn, EngineCommand, OpenSession, SubmitTurn
from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import SamplingParams
from session_server.engine.config import EngineConfig
from session_server.engine.engine import Engine

NUM_RUNNING: Final = 8
STEPS_PER_ROUND: Final = 100
NUM_ROUNDS: Final = 40
NUM_ADMISSIONS: Final = 300
_PAGE_SIZE: Final = 16
_CONTEXT_LEN: Final = 16_384
_VOCAB_SIZE: Final = 1000
_IDLE_TOKENS: Final = 48
_NEW_TOKENS: Final = 16
_OUTPUT: Final = RowResult((7,), (), (), finite=True)
_NOTHING: Final = RowResult((), (), (), finite=True)


def measure_idle_sessions(
    counts: Sequence[int], *, on_round: Callable[[], None]
) -> Mapping[str, Any]:
    """Measure host microseconds of a decode step of `NUM_RUNNING` turns beside idle sessions."""
    benches = {count: _decoding_bench(count) for count in counts}
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(NUM_ROUNDS):
        for count, bench in benches.items():
            times[count].append(_median_step_us(bench))
        on_round()
    return _ratios(times)


def measure_admission(
    histories: Sequence[int], *, on_round: Callable[[], None]
) -> Mapping[str, Any]:
    """Measure host microseconds of the step that admits a turn, by length of the history."""
    benches = {history: _parked_bench(history) for history in histories}
    times: dict[int, list[float]] = {history: [] for history in histories}
    for number in range(NUM_ADMISSIONS):
        for history, bench in benches.items():
            times[history].append(_admission_us(bench, history, number))
        on_round()
    return _ratios(times)


class HostBench:
    """Run an engine in lockstep with a device that answers at once."""

    def __init__(self, num_sessions: int, num_tokens: int) -> None:
        group = LayerGroup(PoolName("full"), LayerKind.FULL, (0,), 1, 8, 4)
        num_pages = num_tokens // _PAGE_SIZE + 2 * num_sessions + 64
        capacity = Capacity(
            MappingProxyType({group.pool: num_pages}), num_sessions + NUM_RUNNING, _CONTEXT_LEN
        )
        self.engine = Engine(
            SessionAwareCache(CacheSpec((group,), _PAGE_SIZE), capacity),
            EngineConfig(
                model_fingerprint="bench",
                vocab_size=_VOCAB_SIZE,
                eos_token_ids=(),
                chunk_tokens=_CONTEXT_LEN,
                num_in_flight=1,
            ),
        )
        self._results: list[StepResult] = []
        self._rng = np.random.default_rng(0)

    def step(self, commands: Sequence[EngineCommand] = ()) -> bool:
        """Run one step and its forward. Return whether anything was launched."""
        outcome = self.engine.step(0.0, commands, self._results)
        self._results = [_answer(outcome.batch)] if outcome.batch is not None else []
        return outcome.batch is not None

    def settle(self) -> None:
        """Step until nothing is launched."""
        while self.step():
            pass

    def random_tokens(self, num_tokens: int) -> tuple[int, ...]:
        """Return random tokens, which share no prefix with other sessions."""
        return tuple(self._rng.integers(0, _VOCAB_SIZE, num_tokens).tolist())


def _decoding_bench(num_idle: int) -> HostBench:
    bench = HostBench(num_idle + NUM_RUNNING, (num_idle + NUM_RUNNING) * 64 + (1 << 17))
    for number in range(num_idle):
        bench.step([*_open_and_submit(bench, f"idle{number}", _IDLE_TOKENS, max_tokens=1)])
    bench.settle()
    for number in range(NUM_RUNNING):
        bench.step([*_open_and_submit(bench, f"run{number}", 64, max_tokens=_CONTEXT_LEN)])
    return bench


def _parked_bench(history: int) -> HostBench:
    bench = HostBench(1, history + 1024)
    if history:
        bench.step([*_open_and_submit(bench, "s", history, max_tokens=0)])
    else:
        bench.step([OpenSession(session_id=SessionId("s"), tenant_salt="t")])
    bench.settle()
    return bench


def _open_and_submit(
    bench: HostBench, name: str, num_tokens: int, *, max_tokens: int
) -> tuple[EngineCommand, EngineCommand]:
    session_id = SessionId(name)
    return (
        OpenSession(session_id=session_id, tenant_salt="t"),
        SubmitTurn(
            session_id=session_id,
            turn_id=TurnId(name),
            base_len=0,
            tokens=bench.random_tokens(num_tokens),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0),
        ),
    )


def _median_step_us(bench: HostBench) -> float:
    times = []
    for _ in range(STEPS_PER_ROUND):
        begin = time.perf_counter()
        launched = bench.step()
        times.append((time.perf_counter() - begin) * 1e6)
        assert launched, "the running turns outlast the benchmark"
    return statistics.median(times)


def _admission_us(bench: HostBench, history: int, number: int) -> float:
    """Submit a turn, time the step that launches its first forward, and cancel it."""
    turn_id = TurnId(f"t{number}")
    command = SubmitTurn(
        session_id=SessionId("s"),
        turn_id=turn_id,
        base_len=history,
        tokens=bench.random_tokens(_NEW_TOKENS),
        sampling=SamplingParams(max_tokens=64, temperature=0.0, seed=0),
    )
    begin = time.perf_counter()
    launched = bench.step([command])
    elapsed_us = (time.perf_counter() - begin) * 1e6
    assert launched, "an idle engine admits at once"
    bench.step([CancelTurn(turn_id=turn_id, num_outputs=None)])
    bench.settle()
    return elapsed_us


def _answer(batch: Batch) -> StepResult:
    rows = tuple(_OUTPUT if row.sample else _NOTHING for row in batch.rows)
    return StepResult(batch.step, rows, forward_s=0.0)


def _ratios(times: Mapping[int, Sequence[float]]) -> Mapping[str, Any]:
    medians = {size: statistics.median(values) for size, values in times.items()}
    first = next(iter(medians.values()))
    return {
        str(size): {"median_us": median, "ratio": median / first}
        for size, median in medians.items()
    }
