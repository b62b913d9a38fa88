"""Log throughput every few seconds of work, and nothing while no turn runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from session_server.core.events import EngineDied, EngineEvent, EngineStats

REST_S: Final = 2.0
"""Seconds without a sample while no turn is known to run that count as rest: work brings a sample
every second. Turns that are shorter than that begin and end between two samples."""


class ThroughputLog:
    """Compare samples of the engine's totals. `interval_s`: seconds of work per line; 0: none.

    Time in which no turn runs or waits does not count, except for pauses between turns.
    """

    def __init__(
        self, logger: logging.Logger, *, interval_s: float, now_s: Callable[[], float]
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._now_s = now_s
        self._first: EngineStats | None = None
        self._last: EngineStats | None = None
        self._last_s = 0.0
        self._worked_s = 0.0

    def on_event(self, event: EngineEvent) -> None:
        """Add a sample; ignore other events."""
        if isinstance(event, EngineDied):
            self._first = self._last = None
        elif isinstance(event, EngineStats) and self._interval_s > 0:
            self._add_sample(event)

    def _add_sample(self, sample: EngineStats) -> None:
        now_s = self._now_s()
        if self._first is None or self._last is None:
            self._first, self._worked_s = sample, 0.0
        else:
            gap_s = now_s - self._last_s
            was_busy = bool(self._last.running or self._last.waiting)
            self._worked_s += gap_s if was_busy or gap_s <= REST_S else 0.0
        self._last, self._last_s = sample, now_s
        if self._worked_s >= self._interval_s:
            self._write(self._first, sample)
            self._first, self._worked_s = sample, 0.0

    def _write(self, first: EngineStats, last: EngineStats) -> None:
        num_prompt = last.prompt_tokens - first.prompt_tokens
        num_cached = last.cached_tokens - first.cached_tokens
        num_output = last.generated_tokens - first.generated_tokens
        self._logger.info(
            "throughput output_per_s=%.1f input_per_s=%.1f cached_share=%.2f running=%d "
            "waiting=%d sessions=%d",
            num_output / self._worked_s,
            (num_prompt - num_cached) / self._worked_s,
            num_cached / num_prompt if num_prompt else 0.0,
            last.running,
            last.waiting,
            last.sessions,
        )
