"""The seeded bugs are what they say: each changes the code as it stands today."""

from __future__ import annotations

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.registry import MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_code_inside_its_block_and_nothing_after_it(name: str) -> None:
    mutant = MUTANTS[name]
    before = codes(mutant)
    with mutant.apply():
        assert all(code != right for code, right in zip(codes(mutant), before, strict=True))
    assert codes(mutant) == before


def test_no_two_mutants_are_one() -> None:
    assert len({mutant.edits for mutant in MUTANTS.values()}) == len(MUTANTS)
    assert len({mutant.bug for mutant in MUTANTS.values()}) == len(MUTANTS)


def codes(mutant: Mutant) -> list[object]:
    """The code objects a mutant is about, as they are now."""
    return [edit.function.__code__ for edit in mutant.edits]
