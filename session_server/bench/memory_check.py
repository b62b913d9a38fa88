"""Measure the cost of the memory checker: step times with it off and on, on the embedded model.

Three engines with a runner each, two with `--memory-check off` and one with `warn` (levels 0, 1 and
3), run the same turns, interleaved step by step, so that a machine whose speed drifts affects them
alike; the ratio of the two equal ones shows the remaining noise. A round is one turn of every
running session: 16 tokens in, 32 out, always after the same history. Each step of a round counts
with its median over the rounds: a median over steps would hide the checks at the end of a turn, and
a mean would include other load of the machine. The checker's own measurement of its time, probes
included, is reported beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from cache.session_cache import SessionAwareCache
from session_server.core.batch import StepResult
from session_server.core.commands import EngineCommand, OpenSession, ReportMemory, SubmitTurn
from session_server.core.events import CheckerReport, EngineEvent, MemoryReported
from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import SamplingParams
from session_server.demo import MODEL_DIR
from session_server.engine.config import EngineConfig, MemoryCheck, MemoryPolicy
from session_server.engine.engine import Engine
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import RunnerOptions, load_runner

_MODES: Final = MappingProxyType(
    {"off": MemoryCheck.OFF, "on": MemoryCheck.WARN, "again": MemoryCheck.OFF}
)
_PAGE_SIZE: Final = 16
_HISTORY: Final = 64
_NUM_INPUT: Final = 16
_NUM_OUTPUT: Final = 32
_IDLE_TOKENS: Final = 24
_CONTEXT_LEN: Final = 1024
_SESSIONS_AT_ONCE: Final = 500
_TOKEN_IDS: Final = (300, 1300)


@dataclass(frozen=True, slots=True)
class MemoryCheckWorkload:
    """Configure `num_rounds` rounds per number of idle sessions and of running turns, ascending."""

    idle_counts: tuple[int, ...] = (0, 1000, 5000)
    running_counts: tuple[int, ...] = (1, 8)
    num_rounds: int = 60

    @property
    def total_rounds(self) -> int:
        """Return the rounds of each engine."""
        return len(self.idle_counts) * len(self.running_counts) * self.num_rounds


def measure_memory_check(
    load: MemoryCheckWorkload, *, on_round: Callable[[], None]
) -> dict[str, Any]:
    """Measure microseconds of a step by idle sessions and running turns: off, on, and off again."""
    benches = {name: _Bench(mode, load) for name, mode in _MODES.items()}
    figures: dict[str, Any] = {}
    for num_idle in load.idle_counts:
        for bench in benches.values():
            bench.park(num_idle)
        for num_running in load.running_counts:
            figures[f"{num_idle} idle, {num_running} running"] = _measure(
                benches, num_running, load.num_rounds, on_round
            )
    checks = benches["on"].checks()
    return {
        "variants": figures,
        "probes": checks.probes,
        "probe_ms": checks.probe_ms / checks.probes if checks.probes else None,
        "violations": checks.violations,
    }


def _measure(
    benches: dict[str, _Bench], num_running: int, num_rounds: int, on_round: Callable[[], None]
) -> dict[str, Any]:
    _round(benches, num_running)
    before = benches["on"].checks()
    rounds: dict[str, list[list[float]]] = {name: [] for name in benches}
    # The served engine collects garbage so rarely that it would distort any step here.
    gc.collect()
    gc.disable()
    try:
        for number in range(num_rounds):
            # The engine that goes first rotates as well.
            names = [*benches][number % len(benches) :] + [*benches][: number % len(benches)]
            times = _round({name: benches[name] for name in names}, num_running)
            for name in names:
                rounds[name].append(times[name])
            on_round()
    finally:
        gc.enable()
    after = benches["on"].checks()
    num_steps = after.levels["0"] - before.levels["0"]
    typical = {name: float(np.median(rounds[name], axis=0).mean()) * 1e6 for name in benches}
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


def _round(benches: dict[str, _Bench], num_running: int) -> dict[str, list[float]]:
    """Run one round of each, in lockstep, and return the seconds of their steps."""
    steps = zip(*(bench.round(num_running) for bench in benches.values()), strict=True)
    return dict(zip(benches, map(list, zip(*steps, strict=True)), strict=True))


class _Bench:
    """Run one engine with its own runner and pool, which waits for every forward.

    Its clock advances by the time of its own steps, so interleaved engines each see only their own
    work.
    """

    def __init__(self, mode: MemoryCheck, load: MemoryCheckWorkload) -> None:
        num_idle, num_running = max(load.idle_counts), max(load.running_counts)
        num_tokens = 2 * _PAGE_SIZE * num_idle + _CONTEXT_LEN * num_running
        loaded = load_runner(
            MODEL_DIR,
            RunnerOptions(
                page_size=_PAGE_SIZE,
                num_rows=num_idle + num_running,
                max_context_len=_CONTEXT_LEN,
                memory=MemoryLimits(max_total_tokens=num_tokens),
            ),
        )
        settings = EngineConfig(
            model_fingerprint="bench",
            vocab_size=loaded.config.vocab_size,
            eos_token_ids=(),
            num_in_flight=1,
            memory=MemoryPolicy(mode),
        )
        cache = SessionAwareCache(loaded.spec, loaded.plan.capacity)
        self._engine = Engine(cache, settings, stopwatch=time.perf_counter)
        self._runner = loaded.runner
        self._results: list[StepResult] = []
        self._rng = np.random.default_rng(0)
        self._now_s = 0.0
        self._num_idle = 0
        self._running: list[SessionId] = []
        self._num_turns = 0

    def park(self, num_idle: int) -> None:
        """Create idle sessions up to `num_idle`, each with a whole page and part of a second."""
        for first in range(self._num_idle, num_idle, _SESSIONS_AT_ONCE):
            names = range(first, min(num_idle, first + _SESSIONS_AT_ONCE))
            self._open([SessionId(f"idle{number}") for number in names], _IDLE_TOKENS)
        self._num_idle = max(self._num_idle, num_idle)

    def round(self, num_running: int) -> Iterator[float]:
        """Run one turn of `num_running` sessions; yield the seconds of each step and forward."""
        while len(self._running) < num_running:
            self._running.append(SessionId(f"running{len(self._running)}"))
            self._open(self._running[-1:], _HISTORY)
        answer = SamplingParams(max_tokens=_NUM_OUTPUT, temperature=0.0, seed=0, ignore_eos=True)
        sessions = self._running[:num_running]
        yield from self._run(
            [self._turn(session, _HISTORY, _NUM_INPUT, answer) for session in sessions]
        )

    def checks(self) -> CheckerReport:
        """Return the checker's report."""
        (report,) = self._step([ReportMemory(request_id=0)])
        assert isinstance(report, MemoryReported)
        return report.checks

    def _open(self, names: Sequence[SessionId], num_tokens: int) -> None:
        nothing = SamplingParams(max_tokens=0, temperature=0.0, seed=0)
        commands: list[EngineCommand] = []
        for name in names:
            commands.append(OpenSession(session_id=name, tenant_salt="bench"))
            commands.append(self._turn(name, 0, num_tokens, nothing))
        for _ in self._run(commands):
            pass

    def _turn(
        self, session_id: SessionId, base_len: int, num_tokens: int, sampling: SamplingParams
    ) -> SubmitTurn:
        self._num_turns += 1
        return SubmitTurn(
            session_id=session_id,
            turn_id=TurnId(f"t{self._num_turns}"),
            base_len=base_len,
            tokens=tuple(self._rng.integers(*_TOKEN_IDS, num_tokens).tolist()),
            sampling=sampling,
        )

    def _run(self, commands: Sequence[EngineCommand]) -> Iterator[float]:
        """Send commands and step until nothing is launched; yield the seconds of each step.

        A probe counts toward the step that waits for it, so that the number of steps is the same
        with and without probes.
        """
        begun_s = self._now_s
        self._step(commands)
        while self._results:
            if self._results[0].probe_holds is None:
                yield self._now_s - begun_s
                begun_s = self._now_s
            self._step(())
        yield self._now_s - begun_s

    def _step(self, commands: Sequence[EngineCommand]) -> list[EngineEvent]:
        """Run one step and its forward, and return the events."""
        begun_s = time.perf_counter()
        outcome = self._engine.step(self._now_s, commands, self._results)
        self._results = []
        if outcome.batch is not None:
            self._results = [self._runner.launch(outcome.batch).wait()]
        self._now_s += time.perf_counter() - begun_s
        return outcome.events
