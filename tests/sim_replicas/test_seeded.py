"""The gate: the simulator finds seeded bugs of replicas. A full search is
`python -m tests.sim_replicas.search`; here each is looked for where that found it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest

from tests.depth import at_depth
from tests.sim_replicas import test_found
from tests.sim_replicas.judge import Broken
from tests.sim_replicas.seeded import BUDGET_STEPS, MUTANTS, SURVIVORS, recorded, search
from tests.sim_replicas.simulation import watched
from tests.sim_replicas.test_found import Quiet

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


DIRECTED: Mapping[str, Callable[[Quiet], None]] = {
    "waiting turn begins": test_found.test_a_turn_that_waits_in_a_lost_session_does_not_begin,
    "written under the next lease": (
        test_found.test_what_waits_under_one_lease_is_not_written_under_the_next
    ),
}
"""The schedules of those that random ones do not meet."""


@pytest.mark.parametrize("name", SURVIVORS)
def test_what_random_schedules_do_not_meet_a_directed_one_finds(name: str) -> None:
    with watched():
        quiet = Quiet()
        try:
            with MUTANTS[name].apply(), pytest.raises((AssertionError, Broken)):
                DIRECTED[name](quiet)
        finally:
            quiet.end()


def test_what_random_schedules_do_not_find_is_explained_and_is_little() -> None:
    assert set(FOUND) | set(SURVIVORS) == set(MUTANTS)
    assert not set(FOUND) & set(SURVIVORS)
    assert len(FOUND) >= 0.9 * len(MUTANTS)
    assert all(found.steps <= BUDGET_STEPS for found in FOUND.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_code_inside_its_block_and_nothing_after_it(name: str) -> None:
    functions = [edit.function for edit in MUTANTS[name].edits]
    before = [function.__code__ for function in functions]
    with MUTANTS[name].apply():
        assert all(f.__code__ != code for f, code in zip(functions, before, strict=True))
    assert [function.__code__ for function in functions] == before
