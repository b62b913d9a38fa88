"""The second quarter of a million simulated steps, see `shards`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim import shards

SHARDS = (2, 3)
pytestmark = pytest.mark.timeout(shards.TIMEOUT_S)


@pytest.mark.parametrize("shard", SHARDS)
def test_every_step_of_a_shard_keeps_every_promise(
    shard: int, record_property: Callable[[str, object], None]
) -> None:
    totals = shards.play_shard(shard)
    record_property("simulated", shards.figures(totals))
    assert not shards.missing(totals.coverage, shards.INTERESTING)


def test_what_is_rare_was_reached_too() -> None:
    assert not shards.missing(shards.reached(SHARDS), shards.RARE)
