"""KV outside of the pools: what seeds that have tiers keep, and what they must reach."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import pytest

from tests.depth import at_depth
from tests.sim.campaign import Totals, play_steps
from tests.sim.config import FIRST_TIERED

SHARD_STEPS: Final = at_depth(25_000, proof=1_000_000)
SHARD_SEEDS: Final = 1_000_000
"""The second shard begins this many seeds behind the first."""

_TIMEOUT_S: Final = 3600

INTERESTING: Final = (
    "fault engine_death",
    "fault quarantine",
    "fault rebuild",
    "fault tier_copy",
    "fault tier_file",
    "fault tier_room",
    "tier: copied back though nobody waits",
    "tier: copied in",
    "tier: copied out",
    "tier: copy in failed",
    "tier: copy out failed",
    "tier: a copied beginning gave way to its end",
    "tier: deleted beside one that has its path too",
    "tier: disk full",
    "tier: disk silent",
    "tier: disk full of files from before",
    "tier: draft waits for its copy",
    "tier: ended with all on disk",
    "tier: file gave way that is in host memory",
    "tier: file not written",
    "tier: files are looked for behind a path",
    "tier: found after an engine's death",
    "tier: found on disk",
    "tier: full",
    "tier: gave way to others on the disk",
    "tier: no room for a file",
    "tier: full + recurrent",
    "tier: full + window",
    "tier: host memory full",
    "tier: latent",
    "tier: read after an engine's death",
    "tier: read from disk",
    "tier: read what an engine wrote at its end",
    "tier: restored after a retraction",
    "tier: several segments on a path",
    "tier: several tenants",
    "tier: too little time to write all",
    "tier: window",
    "tier: written to disk",
)
"""What the two shards have to reach, and in a proof each of them."""

RARE: Final = (
    "tier: closed during a copy",
    "tier: copy forgotten before it was read",
    "tier: copy given up",
    "tier: ended while its KV was copied",
    "tier: file refused",
    "tier: no room for a file, and none is missing",
    "tier: quarantine during copies",
    "tier: session forgotten that is not open",
    "tier: rebuild during copies",
    "tier: waits for copies of others",
)
"""What two shards have to reach together."""


@pytest.mark.timeout(_TIMEOUT_S)
class TestTiers:
    @pytest.mark.parametrize("shard", [0, 1])
    def test_every_step_of_a_shard_keeps_every_promise(
        self, shard: int, record_property: Callable[[str, object], None]
    ) -> None:
        totals = play_shard(shard)
        record_property("simulated", totals.figures)
        wanted = at_depth((), proof=INTERESTING)
        missing = [name for name in wanted if not totals.coverage[name]]
        assert not missing, missing

    def test_what_is_interesting_and_what_is_rare_was_reached(self) -> None:
        coverage = play_shard(0).coverage + play_shard(1).coverage
        missing = [name for name in (*INTERESTING, *RARE) if not coverage[name]]
        assert not missing, missing


@functools.cache
def play_shard(shard: int) -> Totals:
    """Simulate the seeds of one shard until it has made its steps; once in a process."""
    return play_steps(FIRST_TIERED + shard * SHARD_SEEDS, SHARD_STEPS)
