"""One fault in a run, at the first opportunity, at a later one, and so on until a run has no more.

Whatever state an engine, a turn or a connection is in when a site can fail, some n strikes there.
Every run is checked as all simulations are: after every step, and for what is left at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import fields

import pytest

from tests.depth import at_depth
from tests.sim.config import Front
from tests.sim.configs import rich_config
from tests.sim.faults import FaultRates, OneFault, Site
from tests.sim.simulation import simulate

STRIDE = at_depth(20, proof=1)
"""From one opportunity that is struck to the next. Where one run has no more, another goes on."""

MAX_POINTS = 100
MIN_POINTS = MAX_POINTS // STRIDE
"""Opportunities that are struck at each site, until everything wanted was reached."""

MAX_STEPS = 150
"""Of a run, before it comes to its end."""

DIRECT = {
    Site.ALLOC_PAGE: ("retract", "shortfall"),
    Site.ALLOC_ROW: ("resumed after a retraction",),
    Site.DEVICE_NAN: ("failed numerical_error",),
    Site.DEVICE_RAISE: ("admitted again",),
    Site.DEVICE_POISON: ("failed device_failed",),
    Site.EVICTION: ("tier: copied in",),
    Site.QUARANTINE: ("failed internal_inconsistency", "tier: quarantine during copies"),
    Site.REBUILD: ("admitted again", "tier: rebuild during copies"),
    Site.TIER_COPY: ("tier: copy out failed", "tier: copy in failed", "tier: file not written"),
    Site.TIER_FILE: ("tier: file refused",),
    Site.TIER_ROOM: ("tier: gave way to others on the disk",),
}
WIRE = {
    Site.ENGINE_DEATH: ("engine died under turns", "turn failed: engine_restarting"),
    Site.NET_DROP: ("resumed", "turn cancelled by disconnected, keeps nothing"),
    Site.NET_STALL: ("deltas merged",),
    Site.TOKENIZER_SLOW: ("turn failed: tokenize_failed", "refused: tokenize_failed"),
}
"""What each loop must have led to at least once."""

TIERED_SITES = {
    Site.EVICTION,
    Site.QUARANTINE,
    Site.REBUILD,
    Site.TIER_COPY,
    Site.TIER_FILE,
    Site.TIER_ROOM,
}
"""Sites of an engine that keeps KV outside of its pools."""


def test_every_site_has_a_rate_and_a_loop() -> None:
    assert {each.name for each in fields(FaultRates)} == set(Site) == DIRECT.keys() | WIRE.keys()


@pytest.mark.parametrize("site", DIRECT)
def test_each_opportunity_of_the_engine_or_its_device_to_fail(site: Site) -> None:
    fail_at_each(site, Front.DIRECT, DIRECT[site])


@pytest.mark.parametrize("site", WIRE)
def test_each_opportunity_of_the_server_or_its_network_to_fail(site: Site) -> None:
    fail_at_each(site, Front.WIRE, WIRE[site])


def fail_at_each(site: Site, front: Front, wanted: Collection[str]) -> None:
    """Let the site fail at one opportunity after another; together they must reach `wanted`."""
    reached: Counter[str] = Counter()
    num_points, seed, nth = 0, 1, 1
    while num_points < MIN_POINTS or not reached.keys() >= set(wanted):
        assert num_points < MAX_POINTS, reached
        report = simulate(
            rich_config(
                seed, front, only_fault=OneFault(site, nth), is_tiered=site in TIERED_SITES
            ),
            max_steps=MAX_STEPS,
        )
        if report.faults:
            assert report.coverage[f"fault {site}"] == report.faults == 1
            reached += report.coverage
            num_points, nth = num_points + 1, nth + STRIDE
        else:
            assert nth > 1, f"seed {seed} has no opportunity at all"
            seed, nth = seed + 1, 1
