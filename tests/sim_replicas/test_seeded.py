"""The gate: the simulator finds seeded bugs of replicas. A full search is
`python -m tests.sim_replicas.search`; here each is looked for where that found it."""

from __future__ import annotations

import itertools

import pytest

from tests.depth import at_depth
from tests.sim_replicas.seeded import BUDGET_STEPS, MUTANTS, recorded, search

FOUND = recorded()
MARGIN_STEPS = 100_000
"""Seeds are drawn otherwise whenever the simulator learns something."""

QUICK = sorted(FOUND, key=lambda name: FOUND[name].steps)[: at_depth(12, proof=len(FOUND))]
"""Those that are found soon; `PROVE=1` looks for all."""

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("name", QUICK)
def test_the_simulator_finds(name: str) -> None:
    found = FOUND[name]
    most = MARGIN_STEPS + 2 * found.steps
    assert search(MUTANTS[name], itertools.count(found.seed), max_steps=most), MUTANTS[name].bug


def test_random_schedules_find_all_seeded_bugs() -> None:
    assert set(FOUND) == set(MUTANTS)
    assert all(found.steps <= BUDGET_STEPS for found in FOUND.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_code_inside_its_block_and_nothing_after_it(name: str) -> None:
    functions = [edit.function for edit in MUTANTS[name].edits]
    before = [function.__code__ for function in functions]
    with MUTANTS[name].apply():
        assert all(f.__code__ != code for f, code in zip(functions, before, strict=True))
    assert [function.__code__ for function in functions] == before
