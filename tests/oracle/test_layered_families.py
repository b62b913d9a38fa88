"""Families whose layers differ (windows, experts, norms in other places) against `transformers`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from session_server.core.ids import SessionId
from tests.oracle.checkpoints import LAYERED_FAMILIES
from tests.oracle.conversations import Layout
from tests.oracle.oracle import Oracle
from tests.oracle.talks import Reference, Setup, Talk, assert_like_reference, run_talks

PIECES = ((20, 1, 1, 18, 1), (7, 5, 1, 9, 3), (1, 33, 2, 1, 4))
PAGE_SIZES = (1, 4, 16, 64, 256)
CHUNKS = (1, 7, 64)

# Overlap goes on and off so that each page size and each chunk size has both.
MATRIX = [
    Setup(family, page_size, chunk, bool(index % 2))
    for family in LAYERED_FAMILIES
    for index, (page_size, chunk) in enumerate(itertools.product(PAGE_SIZES, CHUNKS))
]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("family", LAYERED_FAMILIES)
def test_appended_turns_give_the_logits_of_one_full_forward(
    family: str, chunk: int, page_size: int, oracle: Oracle
) -> None:
    directory = oracle.directory(family)
    oracle.talk(directory, page_size=page_size, chunk=chunk, layout=Layout.SCATTERED)


@pytest.mark.parametrize("family", LAYERED_FAMILIES)
def test_the_reference_backend_is_as_exact(family: str, oracle: Oracle) -> None:
    directory = oracle.directory(family)
    oracle.talk(directory, page_size=4, chunk=7, layout=Layout.RUNS, backend="torch")


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_five_turns_in_company_are_what_transformers_computes(
    case: Setup, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    talks = [
        Talk(SessionId(f"s{i}"), p, rng=np.random.default_rng(i)) for i, p in enumerate(PIECES)
    ]
    run_talks(case, checkpoints[case.family], talks)
    for talk in talks:
        assert_like_reference(talk, references[case.family])
