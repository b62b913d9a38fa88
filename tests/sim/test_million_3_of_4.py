"""The third quarter of a million simulated steps, see `shards`."""

from __future__ import annotations

from tests.sim.shards import Quarter


class TestThirdQuarter(Quarter):
    SHARDS = (4, 5)
