"""Counters of one engine since its start, and when they are shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

STATS_INTERVAL_S: Final = 1.0
"""Time between two samples of the counters, while there is work."""


@dataclass(slots=True)
class Counters:
    """Totals. `host_s`: time outside forwards, measured by whoever drives the engine.

    `overshoots`: rows computed for turns that had ended or been retracted by then. `shortfalls`:
    turns that waited another step because pages the plan counted on were not to be had.
    `draft_tokens`: guesses verified; `accepted_tokens`: those that were right.
    """

    steps: int = 0
    forward_s: float = 0.0
    host_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    retractions: int = 0
    coolings: int = 0
    overshoots: int = 0
    shortfalls: int = 0


class StatsPulse:
    """Says when a sample of the counters is due."""

    def __init__(self) -> None:
        self._shown_s = -math.inf
        self._is_shown_busy = False

    def is_due(self, now_s: float, *, has_worked: bool, is_busy: bool) -> bool:
        """Whether to show the counters now; ask once per step."""
        # Nothing follows the last turn: what ran a moment ago must not be shown for hours.
        has_emptied = self._is_shown_busy and not is_busy
        if not has_emptied and not (has_worked and now_s - self._shown_s >= STATS_INTERVAL_S):
            return False
        self._shown_s = now_s
        self._is_shown_busy = is_busy
        return True
