"""KV outside of the pools: what tiered seeds keep, and what they must reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from tests.depth import at_depth
from tests.sim.campaign import play_steps
from tests.sim.config import FIRST_TIERED

SHARD_STEPS: Final = at_depth(40_000, proof=1_000_000)
SHARD_SEEDS: Final = 1_000_000

INTERESTING: Final = ("change of KV",)
"""What every shard must have reached."""


@pytest.mark.timeout(3600)
class Shard:
    """Seeds from `FIRST_SEED` on."""

    FIRST_SEED: int

    def test_every_step_with_tiers_keeps_every_promise(
        self, record_property: Callable[[str, object], None]
    ) -> None:
        totals = play_steps(self.FIRST_SEED, SHARD_STEPS)
        record_property("simulated", totals.figures)
        missing = [name for name in INTERESTING if not totals.coverage[name]]
        assert not missing, missing


class TestFirstShard(Shard):
    FIRST_SEED = FIRST_TIERED


class TestSecondShard(Shard):
    FIRST_SEED = FIRST_TIERED + SHARD_SEEDS
