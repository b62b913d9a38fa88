"""The second quarter of a million simulated steps, see `shards`."""

from __future__ import annotations

from tests.sim.shards import Quarter


class TestSecondQuarter(Quarter):
    SHARDS = (2, 3)
