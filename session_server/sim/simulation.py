"""One simulation from its seed, or from the trace of an earlier one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from session_server.sim.config import SimConfig, draw_config
from session_server.sim.direct import DirectOps, DirectWorld
from session_server.sim.draws import Draws
from session_server.sim.failure import Broken, Layer, SimFailure
from session_server.sim.stage import Stage
from session_server.sim.trace import Op, Trace

_SITES_SEED: Final = 0x51
"""Told apart from the draws that made the configuration."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one simulation was and reached. `steps` are engine steps, all of them checked."""

    seed: int
    config: SimConfig
    steps: int
    turns: int
    aborts: int
    closes: int
    faults: int
    coverage: Counter[str]


def run(seed: int, *, max_steps: int | None = None) -> Report:
    """Simulate what the seed says, to its end or until `max_steps` steps were made under load; then
    let everything end, close and empty, and compare with the beginning.

    Raises:
        SimFailure: a promise of the server does not hold.
    """
    return simulate(draw_config(seed), max_steps=max_steps)


def simulate(config: SimConfig, *, max_steps: int | None = None) -> Report:
    """Simulate one configuration. See `run`."""
    return _Simulation(config).play(None, max_steps)


def replay(trace: Trace) -> Report:
    """Do again what a trace says, with the same phases behind it. See `run`."""
    return _Simulation(trace.config).play(iter(trace.ops), None)


class _Simulation:
    """One run: ops come from a generator or from a trace, and are noted as they are done."""

    def __init__(self, config: SimConfig) -> None:
        self._trace = Trace(config)
        draws = Draws(config.seed ^ _SITES_SEED << 48)
        self._reached: Counter[str] = Counter()
        self._stage = Stage(config, draws, self._reached)
        self._world = DirectWorld(config, draws, self._stage)
        self._ops = DirectOps(config, draws, self._world)

    def play(self, ops: Iterator[Op] | None, max_steps: int | None) -> Report:
        """Load, then rest, close and empty."""
        try:
            self._load(ops, max_steps)
            self._world.finish()
        except Broken as error:
            raise self._failure(error.layer, error.message) from error
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            raise self._failure(Layer.CRASH, message) from error
        return self._report()

    def _load(self, ops: Iterator[Op] | None, max_steps: int | None) -> None:
        config, stage, world = self._trace.config, self._stage, self._world
        draw: Callable[[], Op | None] = self._ops.next if ops is None else lambda: next(ops, None)
        num_ops = config.num_ops if ops is None else None
        while num_ops is None or len(self._trace.ops) < num_ops:
            op = draw()
            if op is None or (max_steps is not None and stage.num_steps >= max_steps):
                return
            self._trace.ops.append(op)
            world.apply(op)

    def _failure(self, layer: Layer, message: str) -> SimFailure:
        return SimFailure(layer, self._stage.num_steps, message, self._trace)

    def _report(self) -> Report:
        reached = self._reached
        return Report(
            seed=self._trace.config.seed,
            config=self._trace.config,
            steps=self._stage.num_steps,
            turns=len(self._stage.history.turns),
            aborts=_total(reached, "cancelled in "),
            closes=_total(reached, "close i"),
            faults=_total(reached, "fault "),
            coverage=reached,
        )


def _total(reached: Counter[str], prefix: str) -> int:
    return sum(count for name, count in reached.items() if name.startswith(prefix))
