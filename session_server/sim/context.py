"""What every part of one simulation shares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from session_server.sim.config import SimConfig
from session_server.sim.draws import Draws
from session_server.sim.story import Story

_SITES_SEED = 0x51 << 48
"""Tells the draws of a run apart from those that made its configuration."""


@dataclass(frozen=True, slots=True)
class SimContext:
    """One simulation's configuration and draws. `reached` counts what happened; `story`, if there
    is one, is told every step."""

    config: SimConfig
    draws: Draws
    story: Story | None = None
    reached: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, config: SimConfig, story: Story | None) -> SimContext:
        """A fresh one."""
        return cls(config, Draws(config.seed ^ _SITES_SEED), story)
