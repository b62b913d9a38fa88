"""What every part of one simulation shares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.sim.carrier import EchoDisk
from tests.sim.config import SimConfig
from tests.sim.draws import Draws
from tests.sim.faults import FaultPoints
from tests.sim.story import Story

_SITES_SEED = 0x51 << 48
"""Tells the draws of a run apart from those that made its configuration."""


@dataclass(frozen=True, slots=True)
class SimContext:
    """One simulation's configuration, draws and faults. `reached` counts what happened; `story`, if
    there is one, is told every step. `disk`: the files of KV, which outlive engines."""

    config: SimConfig
    draws: Draws
    faults: FaultPoints
    story: Story | None = None
    reached: Counter[str] = field(default_factory=Counter)
    disk: EchoDisk = field(default_factory=EchoDisk)

    @classmethod
    def of(cls, config: SimConfig, story: Story | None) -> SimContext:
        """A fresh one."""
        draws = Draws(config.seed ^ _SITES_SEED)
        return cls(config, draws, FaultPoints(draws, config.faults, config.only_fault), story)
