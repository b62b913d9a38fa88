"""The fourth quarter of a million simulated steps, see `shards`."""

from __future__ import annotations

from tests.sim.shards import Quarter


class TestFourthQuarter(Quarter):
    SHARDS = (6, 7)
