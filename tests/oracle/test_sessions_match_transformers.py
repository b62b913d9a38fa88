"""Whole sessions through engine, cache and runner, against `transformers` on the same tokens.

Five turns appended in pieces beside other sessions, in combinations of model family, page size,
chunk size and overlap: each generated token must be the reference's most likely one after
everything before it, and its log-probabilities the reference's within 1e-4.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from session_server.core.ids import SessionId
from tests.depth import cases
from tests.oracle.checkpoints import FAMILIES
from tests.oracle.talks import Reference, Setup, Talk, assert_like_reference, run_talks

PIECES = (20, 1, 1, 18, 1)
COMPANION_PIECES = ((7, 5, 1, 9, 3), (1, 33, 2, 1, 4))

MATRIX = [Setup(*values) for values in cases(FAMILIES, (1, 4, 16, 64), (1, 7, 64), (False, True))]


def new_talks() -> list[Talk]:
    """The session under test and its company."""
    pieces = (PIECES, *COMPANION_PIECES)
    return [Talk(SessionId(f"s{i}"), p, rng=np.random.default_rng(i)) for i, p in enumerate(pieces)]


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_five_turns_in_company_are_what_transformers_computes(
    case: Setup, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    talks = new_talks()
    run_talks(case, checkpoints[case.family], talks)
    for talk in talks:
        assert_like_reference(talk, references[case.family])


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_turns_resume_with_identical_output(
    overlap: bool, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    talks = [
        Talk(SessionId(f"s{i}"), (9, 4), num_outputs=24, rng=np.random.default_rng(i))
        for i in range(6)
    ]
    run_talks(Setup("qwen3", 4, 16, overlap, max_total_tokens=88), checkpoints["qwen3"], talks)
    assert sum(talk.num_retractions for talk in talks) > 0, "the pool was never short"
    for talk in talks:
        assert_like_reference(talk, references["qwen3"])
