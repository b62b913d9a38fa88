"""Logits against `transformers`: every position, through paged KV, in mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from session_server.models.decoder import Decoder
from session_server.models.registry import load_config
from session_server.runner.model_runner import BackendName, ModelRunner
from session_server.runner.weights import load_decoder
from tests.oracle.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    reference_logits,
    to_v4_style,
    write_checkpoint,
)
from tests.oracle.conversations import (
    ANSWER_LEN,
    NUM_TURNS,
    Conversation,
    Drive,
    Layout,
    capacity,
    conversations,
    row_pages,
)

TOLERANCE = 1e-4


class Oracle:
    """Checkpoints, our decoders of them, and the reference logits asked for so far."""

    def __init__(self, checkpoints: dict[str, Path]) -> None:
        self._checkpoints = checkpoints
        self._decoders: dict[Path, Decoder] = {}
        # Exact runs all reach the same sequences, so few references are computed.
        self._references: dict[tuple[Path, tuple[int, ...]], Tensor] = {}

    def directory(self, family: str) -> Path:
        return self._checkpoints[family]

    def talk(
        self,
        directory: Path,
        *,
        page_size: int,
        chunk: int,
        layout: Layout = Layout.CONSECUTIVE,
        backend: BackendName = "auto",
    ) -> list[Conversation]:
        """Hold mixed conversations and compare every logit and every greedy token."""
        if directory not in self._decoders:
            self._decoders[directory] = load(directory)
        decoder = self._decoders[directory]
        spec = decoder.config.cache_spec(page_size, "float32")
        runner = ModelRunner(decoder, spec, capacity(page_size), backend=backend)
        sessions = conversations(seed=7, vocab_size=VOCAB_SIZE)
        Drive(runner, page_size, chunk, row_pages(layout, page_size)).run(sessions)
        for session in sessions:
            self._assert_exact(session, directory)
        return sessions

    def _assert_exact(self, session: Conversation, directory: Path) -> None:
        # The last answer token was sampled but never computed.
        computed = tuple(session.tokens[: session.num_computed])
        key = (directory, computed)
        if key not in self._references:
            self._references[key] = reference_logits(directory, np.array(computed))
        expected = self._references[key]
        seen = torch.stack([session.logits[position] for position in range(len(computed))])
        assert (seen - expected).abs().max().item() <= TOLERANCE
        assert len(session.answers) == NUM_TURNS * ANSWER_LEN
        best = expected.argmax(dim=-1).tolist()
        assert session.answers == {i: best[i - 1] for i in session.answers}


@pytest.fixture(scope="module")
def oracle(checkpoints: dict[str, Path]) -> Oracle:
    return Oracle(checkpoints)


def load(directory: Path) -> Decoder:
    config = load_config(directory)
    return load_decoder(directory, config, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("layout", [Layout.CONSECUTIVE, Layout.SCATTERED])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_appended_turns_give_the_logits_of_one_full_forward(
    *, family: str, chunk: int, page_size: int, layout: Layout, oracle: Oracle
) -> None:
    directory = oracle.directory(family)
    oracle.talk(directory, page_size=page_size, chunk=chunk, layout=layout)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_in_runs_of_different_length_change_nothing(page_size: int, oracle: Oracle) -> None:
    oracle.talk(oracle.directory("qwen3"), page_size=page_size, chunk=7, layout=Layout.RUNS)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_backend_is_as_exact(
    family: str, page_size: int, layout: Layout, oracle: Oracle
) -> None:
    directory = oracle.directory(family)
    oracle.talk(directory, page_size=page_size, chunk=7, layout=layout, backend="torch")


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
