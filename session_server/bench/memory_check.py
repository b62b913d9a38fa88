"""Measure the cost of the memory checker: step times with it off and on, on the embedded model.

Three engines, two with `--memory-check off` and one with `warn`, alternate step by step over the
same turns; the ratio of the two that do the same shows the noise. A round is one turn of every
running session after the same history. Each step of a round is represented by its median over the
rounds: a median over steps would hide what is checked at the end of a turn.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from session_server.bench.harness import SteppedEngine
from session_server.bench.sheet import Sheet
from session_server.core.commands import ReportMemory
from session_server.core.events import CheckerReport, MemoryReported
from session_server.core.ids import SessionId
from session_server.demo import MODEL_DIR
from session_server.engine.config import MemoryCheck, MemoryPolicy
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import RunnerOptions, load_runner

_MODES: Final = MappingProxyType(
    {"off": MemoryCheck.OFF, "on": MemoryCheck.WARN, "again": MemoryCheck.OFF}
)
_PAGE_SIZE: Final = 16
_HISTORY: Final = 64
_NUM_INPUT: Final = 16
_NUM_OUTPUT: Final = 32
_IDLE_TOKENS: Final = 24  # a whole page and part of a second
_CONTEXT_LEN: Final = 1024


@dataclass(frozen=True, slots=True)
class MemoryCheckWorkload:
    """Configure `num_rounds` rounds per number of idle sessions and of running turns, ascending."""

    idle_counts: tuple[int, ...] = (0, 1000, 5000)
    running_counts: tuple[int, ...] = (1, 8)
    num_rounds: int = 60

    @property
    def total_steps(self) -> int:
        """Return the rounds of each engine."""
        return len(self.idle_counts) * len(self.running_counts) * self.num_rounds


def measure(load: MemoryCheckWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Measure microseconds of a step by idle sessions and running turns: off, on, and off again."""
    engines = {name: _make_engine(mode, load) for name, mode in _MODES.items()}
    running = [SessionId(f"running{number}") for number in range(max(load.running_counts))]
    for engine in engines.values():
        engine.park(running, _HISTORY)
    figures: dict[str, Any] = {}
    num_parked = 0
    for num_idle in load.idle_counts:
        for engine in engines.values():
            engine.park([SessionId(f"idle{n}") for n in range(num_parked, num_idle)], _IDLE_TOKENS)
        num_parked = num_idle
        for count in load.running_counts:
            variant = f"{num_idle} idle, {count} running"
            figures[variant] = _measure_variant(engines, running[:count], load.num_rounds, on_step)
    checks = _checks(engines["on"])
    return {
        "variants": figures,
        "probes": checks.probes,
        "probe_ms": checks.probe_ms / checks.probes if checks.probes else None,
        "violations": checks.violations,
    }


SHEETS: Final = (
    Sheet(
        "step of a turn of 16 in / 32 out, medians of rounds, us",
        lambda report: report["variants"],
        ("",),
        {
            "off": "{off_us:.1f}",
            "warn": "{on_us:.1f}",
            "warn / off": "{ratio:.3f}",
            "off / off": "{noise_ratio:.3f}",
            "checks": "{check_us:.2f}",
            "probes": "{probe_us:.2f}",
            "share": "{own_share:.2%}",
        },
    ),
    Sheet(
        "the checker",
        lambda report: report,
        (),
        {"probes": "{probes}", "ms each": "{probe_ms!s:.5}", "violations": "{violations}"},
    ),
)


def _measure_variant(
    engines: Mapping[str, SteppedEngine],
    running: list[SessionId],
    num_rounds: int,
    on_step: Callable[[], None],
) -> dict[str, Any]:
    _round(engines, running)
    before = _checks(engines["on"])
    rounds: dict[str, list[list[float]]] = {name: [] for name in engines}
    # The served engine collects garbage so rarely that it would distort any step here.
    gc.collect()
    gc.disable()
    try:
        for number in range(num_rounds):
            # The engine that goes first rotates as well.
            first = number % len(engines)
            names = [*engines][first:] + [*engines][:first]
            for name, times in _round({name: engines[name] for name in names}, running).items():
                rounds[name].append(times)
            on_step()
    finally:
        gc.enable()
    after = _checks(engines["on"])
    num_steps = after.levels["0"] - before.levels["0"]
    typical = {name: float(np.median(rounds[name], axis=0).mean()) * 1e6 for name in engines}
    check_us = (after.check_ms - before.check_ms) * 1e3 / num_steps
    probe_us = (after.probe_ms - before.probe_ms) * 1e3 / num_steps
    return {
        "off_us": typical["off"],
        "on_us": typical["on"],
        "ratio": typical["on"] / typical["off"],
        "noise_ratio": typical["again"] / typical["off"],
        "check_us": check_us,
        "probe_us": probe_us,
        "own_share": (check_us + probe_us) / (float(np.mean(rounds["on"])) * 1e6),
    }


def _round(
    engines: Mapping[str, SteppedEngine], running: list[SessionId]
) -> dict[str, list[float]]:
    """Run one turn of each session on each engine, in lockstep. Returns seconds of its steps."""
    steps = zip(*(_step_times(engine, running) for engine in engines.values()), strict=True)
    return dict(zip(engines, map(list, zip(*steps, strict=True)), strict=True))


def _step_times(engine: SteppedEngine, running: list[SessionId]) -> Iterator[float]:
    """Yield the seconds of each step of one turn of each session, forward included.

    A probe counts toward the step that waits for it, so that the number of steps is the same
    with and without probes.
    """
    begun_s = engine.now_s
    engine.step([engine.turn(name, _HISTORY, _NUM_INPUT, _NUM_OUTPUT) for name in running])
    while engine.results:
        if engine.results[0].probe_holds is None:
            yield engine.now_s - begun_s
            begun_s = engine.now_s
        engine.step()
    yield engine.now_s - begun_s


def _checks(engine: SteppedEngine) -> CheckerReport:
    """Return the checker's report."""
    report, *_ = engine.step([ReportMemory(request_id=0)])
    assert isinstance(report, MemoryReported)
    return report.checks


def _make_engine(mode: MemoryCheck, load: MemoryCheckWorkload) -> SteppedEngine:
    num_idle, num_running = max(load.idle_counts), max(load.running_counts)
    num_tokens = 2 * _PAGE_SIZE * num_idle + _CONTEXT_LEN * num_running
    options = RunnerOptions(
        page_size=_PAGE_SIZE,
        num_rows=num_idle + num_running,
        max_context_len=_CONTEXT_LEN,
        memory=MemoryLimits(max_total_tokens=num_tokens),
    )
    loaded = load_runner(MODEL_DIR, options)
    return SteppedEngine(
        loaded.spec,
        loaded.plan.capacity,
        forward=lambda batch: loaded.runner.launch(batch).wait(),
        chunk_tokens=512,
        memory=MemoryPolicy(mode),
    )
