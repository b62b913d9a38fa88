"""Step engines by hand and take measurements in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np

from cache.session_cache import SessionAwareCache
from cache.spec import CacheSpec, Capacity
from session_server.core.batch import Batch, StepResult
from session_server.core.commands import EngineCommand, OpenSession, SubmitTurn
from session_server.core.events import EngineEvent
from session_server.core.ids import SessionId, TurnId
from session_server.core.sampling import SamplingParams
from session_server.engine.config import EngineConfig, MemoryPolicy
from session_server.engine.engine import Engine

K = TypeVar("K")

TOKEN_IDS: Final = (300, 1300)  # no specials


def take_turns(
    measures: Mapping[K, Callable[[], float]], num_rounds: int, on_step: Callable[[], None]
) -> dict[K, list[float]]:
    """Call each of `measures` once per round, and `on_step` after each.

    They are interleaved, so that a machine whose speed drifts affects them alike.
    """
    figures: dict[K, list[float]] = {name: [] for name in measures}
    for _ in range(num_rounds):
        for name, measure in measures.items():
            figures[name].append(measure())
            on_step()
    return figures


class SteppedEngine:
    """Step an engine by hand whose device answers each batch before the next step.

    Its clock `now_s` advances by the time of its own steps, so interleaved engines each see only
    their own work.
    """

    def __init__(
        self,
        spec: CacheSpec,
        capacity: Capacity,
        *,
        forward: Callable[[Batch], StepResult],
        chunk_tokens: int,
        memory: MemoryPolicy,
        max_running: int = 64,
    ) -> None:
        config = EngineConfig(
            model_fingerprint="bench",
            vocab_size=TOKEN_IDS[1],
            eos_token_ids=(),
            max_running=max_running,
            max_waiting=1 << 16,
            chunk_tokens=chunk_tokens,
            num_in_flight=1,
            memory=memory,
        )
        self.now_s = 0.0
        self.results: list[StepResult] = []
        self._engine = Engine(
            SessionAwareCache(spec, capacity), config, stopwatch=time.perf_counter
        )
        self._forward = forward
        self._rng = np.random.default_rng(0)
        self._num_turns = 0

    def step(self, commands: Sequence[EngineCommand] = ()) -> list[EngineEvent]:
        """Run one step and its forward, whose result is left in `results`. Return its events."""
        begun_s = time.perf_counter()
        outcome = self._engine.step(self.now_s, commands, self.results)
        self.results = [] if outcome.batch is None else [self._forward(outcome.batch)]
        self.now_s += time.perf_counter() - begun_s
        return outcome.events

    def timed_step_us(self, commands: Sequence[EngineCommand] = ()) -> float:
        """Run one step that launches a forward. Return its microseconds."""
        begun_s = self.now_s
        self.step(commands)
        assert self.results, "this step launches a forward"
        return (self.now_s - begun_s) * 1e6

    def settle(self, commands: Sequence[EngineCommand] = ()) -> None:
        """Send commands and step until nothing is launched."""
        self.step(commands)
        while self.results:
            self.step()

    def turn(
        self, session_id: SessionId, base_len: int, num_tokens: int, max_tokens: int
    ) -> SubmitTurn:
        """Return a greedy turn of `num_tokens` random tokens after `base_len` others."""
        self._num_turns += 1
        return SubmitTurn(
            session_id=session_id,
            turn_id=TurnId(f"t{self._num_turns}"),
            base_len=base_len,
            tokens=tuple(self._rng.integers(*TOKEN_IDS, num_tokens).tolist()),
            sampling=SamplingParams(
                max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True
            ),
        )

    def park(self, session_ids: Sequence[SessionId], num_tokens: int) -> None:
        """Open sessions, prefill each with `num_tokens` tokens, and leave them idle."""
        self.settle([OpenSession(session_id=name, tenant_salt="bench") for name in session_ids])
        if num_tokens:
            self.settle([self.turn(name, 0, num_tokens, 0) for name in session_ids])
