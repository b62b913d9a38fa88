"""The first quarter of a million simulated steps, see `shards`."""

from __future__ import annotations

from tests.sim.shards import Quarter


class TestFirstQuarter(Quarter):
    SHARDS = (0, 1)
