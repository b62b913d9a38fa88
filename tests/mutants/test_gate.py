"""The gate: the simulator finds every seeded bug. A full search is `python -m tests.mutants`; here
each bug is looked for where that found it, and from there on.
"""

from __future__ import annotations

import itertools

import pytest

from tests.depth import at_depth
from tests.mutants.registry import MUTANTS, SURVIVORS
from tests.mutants.search import BUDGET_STEPS, recorded, search
from tests.sim.simulation import run

FOUND = recorded()
MARGIN_STEPS = 100_000
"""Seeds are drawn otherwise whenever the simulator learns something; those that follow must do as
well, and for a bug that took long to find it takes long again."""

pytestmark = pytest.mark.timeout(1800)  # when the record is stale; otherwise it is a second each


@pytest.mark.parametrize("name", sorted(FOUND, key=lambda name: FOUND[name].seed))
def test_the_simulator_finds(name: str) -> None:
    found = FOUND[name]
    max_steps = MARGIN_STEPS + 2 * found.steps
    assert search(MUTANTS[name], itertools.count(found.seed), max_steps=max_steps), (
        f"{MUTANTS[name].bug} Search for it anew: python -m tests.mutants '{name}'"
    )


def test_without_a_bug_the_same_seeds_pass() -> None:
    seeds = sorted({found.seed for found in FOUND.values()})
    for seed in seeds[:: at_depth(9, proof=1)]:
        run(seed)


def test_what_is_not_found_is_explained_and_is_little() -> None:
    assert set(FOUND) | set(SURVIVORS) == set(MUTANTS)
    assert not set(FOUND) & set(SURVIVORS)
    assert len(FOUND) >= 0.95 * len(MUTANTS)
    assert all(found.steps <= BUDGET_STEPS for found in FOUND.values())
