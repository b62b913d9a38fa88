"""The gate: the simulator finds every seeded bug. A full search is `python -m tests.mutants`; here
each bug is looked for where that found it, and from there on.
"""

from __future__ import annotations

import itertools

import pytest

from session_server.sim import run
from tests.mutants.registry import MUTANTS
from tests.mutants.search import BUDGET_STEPS, recorded, search

FOUND = recorded()
MARGIN_STEPS = 50_000
"""A seed is drawn anew whenever the simulator learns something; the next ones must do as well."""


@pytest.mark.parametrize("name", sorted(FOUND, key=lambda name: FOUND[name].seed))
def test_the_simulator_finds(name: str) -> None:
    seeds = itertools.count(FOUND[name].seed)
    assert search(MUTANTS[name], seeds, max_steps=MARGIN_STEPS), MUTANTS[name].bug


def test_without_a_bug_the_same_seeds_pass() -> None:
    for seed in {found.seed for found in FOUND.values()}:
        run(seed)


def test_what_was_found_was_found_within_the_budget() -> None:
    assert set(FOUND) <= set(MUTANTS)
    assert all(found.steps <= BUDGET_STEPS for found in FOUND.values())
