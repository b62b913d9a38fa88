"""`make test` tries every pair of settings, `make prove` every combination."""

from __future__ import annotations

from itertools import product

import pytest

from tests import depth

SETTINGS = ("abcdefg", (1, 4, 16, 64), (False, True), (0, 2, 4))
EVERYTHING = list(product(*SETTINGS))


def test_every_pair_is_somewhere_and_combinations_are_few() -> None:
    chosen = depth.pairwise(EVERYTHING)
    assert set().union(*map(depth.pairs_of, chosen)) == set().union(
        *map(depth.pairs_of, EVERYTHING)
    )
    assert len(chosen) == 28, "as many as the two longest settings have pairs"
    assert chosen == sorted(chosen, key=EVERYTHING.index)


def test_every_value_is_somewhere_where_no_pair_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "IS_PROOF", False)
    chosen = depth.each_value(*SETTINGS)
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(v) for v in SETTINGS]


@pytest.mark.parametrize(
    ("is_proof", "number", "few", "size"), [(False, 28, 7, 3), (True, 168, 168, 50)]
)
def test_a_proof_leaves_nothing_out(
    is_proof: bool, number: int, few: int, size: int, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "IS_PROOF", is_proof)
    assert len(depth.cases(*SETTINGS)) == number
    assert len(depth.each_value(*SETTINGS)) == few
    assert depth.at_depth(3, proof=50) == size
