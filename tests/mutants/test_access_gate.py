"""The gate of access: the tests that are named find every seeded bug of keys and quotas."""

from __future__ import annotations

import inspect

import pytest

from session_server.core.errors import SessionServerError
from tests.mutants.at_access import CAUGHT, Caught
from tests.mutants.registry import MUTANTS

SHOWN = (AssertionError, SessionServerError, pytest.fail.Exception)
"""How a test fails for the reason that it names; anything else is an accident."""


@pytest.mark.parametrize("caught", CAUGHT, ids=lambda caught: caught.by.rpartition(":")[2])
def test_a_test_of_the_suite_finds(caught: Caught, request: pytest.FixtureRequest) -> None:
    names = inspect.signature(caught.test).parameters.keys() - caught.given.keys()
    fixtures = {name: request.getfixturevalue(name) for name in sorted(names)}
    with caught.mutant.apply(), pytest.raises(SHOWN):
        caught.test(**fixtures, **caught.given)


def test_no_two_bugs_are_one() -> None:
    mutants = [*MUTANTS.values(), *(caught.mutant for caught in CAUGHT)]
    assert len({mutant.edits for mutant in mutants}) == len(mutants)
    assert len({mutant.bug for mutant in mutants}) == len(mutants)
