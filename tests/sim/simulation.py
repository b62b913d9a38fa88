"""One simulation from its seed, or from the trace of an earlier one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tests.sim.config import Front, SimConfig, draw_config
from tests.sim.context import SimContext
from tests.sim.direct import DirectWorld
from tests.sim.direct_ops import DirectOps
from tests.sim.failure import Broken, Layer, SimFailure
from tests.sim.loop import Deadlock
from tests.sim.story import Story
from tests.sim.trace import Op, Trace
from tests.sim.wire import WireWorld
from tests.sim.wire_ops import WireOps


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
    simulation = _Simulation(SimContext.of(config, None))
    return simulation.play(simulation.drawn_ops(), max_steps)


def replay(trace: Trace, story: Story | None = None) -> Report:
    """Do again what a trace says, with the same phases behind it. See `run`."""
    return _Simulation(SimContext.of(trace.config, story)).play(trace.ops, None)


class World(Protocol):
    """A front: it does operations, and comes to its end."""

    @property
    def num_steps(self) -> int:
        """Engine steps so far."""
        ...

    def apply(self, op: Op) -> None:
        """Do one operation."""
        ...

    def finish(self) -> None:
        """Let everything end, close, empty, and compare with the beginning."""
        ...

    def close(self) -> None:
        """Let go of everything, also after a failure."""
        ...


class _Simulation:
    """One run: ops come from a generator or from a trace, and are noted as they are done."""

    def __init__(self, context: SimContext) -> None:
        self._context = context
        self._trace = Trace(context.config)
        self._world: World
        self._next_op: Callable[[], Op]
        if context.config.front is Front.WIRE:
            wire = WireWorld(context)
            self._world, self._next_op = wire, WireOps(context, wire).next
        else:
            direct = DirectWorld(context)
            self._world, self._next_op = direct, DirectOps(context, direct).next

    def play(self, ops: Iterable[Op], max_steps: int | None) -> Report:
        """Load, then rest, close and empty."""
        try:
            for op in ops:
                if max_steps is not None and self._world.num_steps >= max_steps:
                    break
                self._trace.ops.append(op)
                if self._context.story is not None:
                    self._context.story.op(op)
                self._world.apply(op)
            self._world.finish()
        except Broken as error:
            raise self._failure(error.layer, error.message) from error
        except Deadlock as error:
            raise self._failure(Layer.LIVENESS, str(error)) from error
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            raise self._failure(Layer.CRASH, message) from error
        finally:
            self._world.close()
        return self._report()

    def drawn_ops(self) -> Iterator[Op]:
        """As many operations as the configuration says."""
        return (self._next_op() for _ in range(self._trace.config.num_ops))

    def _failure(self, layer: Layer, message: str) -> SimFailure:
        return SimFailure(layer, self._world.num_steps, message, self._trace)

    def _report(self) -> Report:
        reached = self._context.reached
        return Report(
            seed=self._trace.config.seed,
            config=self._trace.config,
            steps=self._world.num_steps,
            turns=reached["turn"],
            aborts=_total(reached, "cancelled in "),
            closes=_total(reached, "close i"),
            faults=_total(reached, "fault "),
            coverage=reached,
        )


def _total(reached: Counter[str], prefix: str) -> int:
    return sum(count for name, count in reached.items() if name.startswith(prefix))
