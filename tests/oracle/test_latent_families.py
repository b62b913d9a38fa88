"""What latents add to the proof of families: guesses, retractions, old spellings, exact bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.types import PoolName
from session_server.core.ids import SessionId
from session_server.engine.config import Drafter, Speculation
from session_server.models.registry import load_config
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import RunnerOptions, load_runner
from tests.oracle.checkpoints import to_v4_style, write_checkpoint
from tests.oracle.oracle import Oracle
from tests.oracle.talks import Reference, Setup, Talk, assert_like_reference, run_talks

FAMILY = "deepseek_v3"


def new_talks(*pieces: tuple[int, ...], num_outputs: int) -> list[Talk]:
    return [
        Talk(SessionId(f"s{i}"), p, num_outputs=num_outputs, rng=np.random.default_rng(i))
        for i, p in enumerate(pieces)
    ]


@pytest.mark.parametrize("drafter", Drafter)
def test_guesses_are_verified_over_latents(
    drafter: Drafter, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    """The draft model is the model itself: what it guesses is right, wherever its latents lie."""
    directory = checkpoints[FAMILY]
    draft = directory if drafter is Drafter.MODEL else None
    talks = new_talks((20, 1, 3), (7, 5, 1), (1, 33, 2), num_outputs=16)
    case = Setup(FAMILY, 4, 64, True, speculation=Speculation(4, drafter))
    counters = run_talks(case, directory, talks, draft=draft)
    for talk in talks:
        assert_like_reference(talk, references[FAMILY])
    assert counters.draft_tokens > 0
    if draft is not None:
        assert counters.draft_tokens == counters.accepted_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_turns_resume_with_identical_output(
    overlap: bool, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    talks = new_talks(*[(9, 4)] * 6, num_outputs=24)
    case = Setup(FAMILY, 4, 16, overlap, max_total_tokens=88)
    run_talks(case, checkpoints[FAMILY], talks)
    assert sum(talk.num_retractions for talk in talks) > 0, "the pool was never short"
    for talk in talks:
        assert_like_reference(talk, references[FAMILY])


@pytest.mark.parametrize("family", ["deepseek_v2", FAMILY])
def test_a_configuration_of_transformers_4_is_the_same_model(
    family: str, oracle: Oracle, tmp_path: Path
) -> None:
    directory = write_checkpoint(family, tmp_path)
    before = load_config(directory)
    to_v4_style(directory)
    assert load_config(directory) == before
    oracle.talk(directory, page_size=16, chunk=64)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 3.0}])
def test_other_rotary_scalings_are_exact(
    rope: dict[str, object], oracle: Oracle, tmp_path: Path
) -> None:
    rope = {"rope_theta": 500.0, "mscale_all_dim": 0.8, **rope}
    directory = write_checkpoint(FAMILY, tmp_path, rope_parameters=rope)
    oracle.talk(directory, page_size=16, chunk=64)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_a_pool_of_latents_takes_the_bytes_that_were_planned(
    page_size: int, checkpoints: Mapping[str, Path]
) -> None:
    limits = MemoryLimits(max_total_tokens=1000)
    loaded = load_runner(
        checkpoints[FAMILY],
        RunnerOptions(page_size=page_size, num_rows=2, device="cpu", memory=limits),
    )
    (pool,) = loaded.runner.pools.values()
    num_pages = -(-1000 // page_size) + 1
    assert loaded.plan.capacity.num_pages == {PoolName("latent"): num_pages}
    # Three layers, a latent of 20 and a rotary key of 8, once.
    assert pool.num_bytes == loaded.plan.kv_bytes == num_pages * page_size * 3 * (20 + 8) * 4
    assert pool.dtype == torch.float32
