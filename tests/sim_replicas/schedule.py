"""`Schedule`: what happens in a simulation, in order of a time that nobody waits for."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Schedule:
    """Run events one after another. `now_s`: seconds since the beginning, of the world outside of
    all replicas. `num_steps` have run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_steps = 0
        self._num_made = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when_s: float, run: Callable[[], None]) -> None:
        """Have something happen at a time, behind all that happens then."""
        self._num_made += 1
        heapq.heappush(self._events, (max(when_s, self.now_s), self._num_made, run))

    def after(self, delay_s: float, run: Callable[[], None]) -> None:
        """Have something happen some time from now."""
        self.at(self.now_s + delay_s, run)

    def step(self) -> None:
        """Let the next event happen."""
        self.now_s, _, run = heapq.heappop(self._events)
        self.num_steps += 1
        run()
