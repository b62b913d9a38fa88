"""Logits against `transformers`: every position, through paged KV, in mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from session_server.runner.paged_decoder import BackendName
from tests.depth import cases
from tests.oracle.checkpoints import FAMILIES, to_v4_style, write_checkpoint
from tests.oracle.conversations import Layout
from tests.oracle.oracle import Oracle


@pytest.mark.parametrize(
    ("family", "page_size", "chunk", "layout"),
    cases(FAMILIES, (1, 4, 16, 64), (1, 7, 64), (Layout.CONSECUTIVE, Layout.SCATTERED)),
)
def test_appended_turns_give_the_logits_of_one_full_forward(
    *, family: str, page_size: int, chunk: int, layout: Layout, oracle: Oracle
) -> None:
    directory = oracle.directory(family)
    oracle.talk(directory, page_size=page_size, chunk=chunk, layout=layout)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_in_runs_of_different_length_change_nothing(page_size: int, oracle: Oracle) -> None:
    oracle.talk(oracle.directory("qwen3"), page_size=page_size, chunk=7, layout=Layout.RUNS)


@pytest.mark.parametrize(
    ("family", "layout", "places"),
    cases(FAMILIES, Layout, (("cpu", 1), ("torch", 16), ("cpu", 16))),
)
def test_the_backends_of_torch_are_as_exact(
    family: str, layout: Layout, places: tuple[BackendName, int], oracle: Oracle
) -> None:
    directory, (backend, page_size) = oracle.directory(family), places
    oracle.talk(directory, page_size=page_size, chunk=7, layout=layout, backend=backend)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.4,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
        "truncate": False,
    },
}


@pytest.mark.parametrize("is_v4", [False, True], ids=["v5", "v4"])
@pytest.mark.parametrize("name", ROPES)
def test_scaled_rotary_positions_are_exact(
    name: str, is_v4: bool, oracle: Oracle, tmp_path: Path
) -> None:
    rope = {"rope_theta": 500.0, **ROPES[name]}
    directory = write_checkpoint("llama", tmp_path, rope_parameters=rope)
    if is_v4:
        to_v4_style(directory)
    oracle.talk(directory, page_size=16, chunk=64)


def test_a_sharded_checkpoint_is_the_same_model(oracle: Oracle, tmp_path: Path) -> None:
    directory = write_checkpoint("qwen3", tmp_path, max_shard_size="40KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    oracle.talk(directory, page_size=16, chunk=64)


def test_weights_large_enough_to_be_packed_are_exact(oracle: Oracle, tmp_path: Path) -> None:
    directory = write_checkpoint(
        "qwen3", tmp_path, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, std=0.04
    )
    oracle.talk(directory, page_size=16, chunk=7)
