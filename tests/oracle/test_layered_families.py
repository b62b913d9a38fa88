"""Families whose layers differ (windows, experts, norms in other places) against `transformers`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from session_server.core.ids import SessionId
from session_server.engine.config import Drafter, Speculation
from session_server.models.config import FULL_POOL
from session_server.models.registry import load_config
from session_server.runner.model_runner import BackendName, ModelRunner
from session_server.runner.weights import load_decoder
from tests.depth import at_depth, cases
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import (
    FAMILIES,
    LAYERED_FAMILIES,
    RECURRENT_FAMILIES,
    to_mxfp4,
    to_v4_style,
    write_checkpoint,
)
from tests.oracle.conversations import Layout, capacity
from tests.oracle.oracle import TOLERANCE, Oracle
from tests.oracle.record import CHUNKS, recorded
from tests.oracle.record import PAGE_SIZES as ALL_PAGE_SIZES
from tests.oracle.talks import Reference, Setup, Talk, assert_like_reference, run_talks
from tests.runner.rows import Rows

PIECES = ((20, 1, 1, 18, 1, 19), (7, 5, 1, 9, 3), (1, 33, 2, 1, 4))

PAGE_SIZES = at_depth((1, 16, 256), proof=ALL_PAGE_SIZES)

MATRIX = [Setup(*values) for values in cases(LAYERED_FAMILIES, PAGE_SIZES, CHUNKS, (False, True))]


def new_talks() -> list[Talk]:
    """Three sessions, whose turns do not keep step."""
    return [Talk(SessionId(f"s{i}"), p, rng=np.random.default_rng(i)) for i, p in enumerate(PIECES)]


@pytest.mark.parametrize(
    ("family", "page_size", "chunk"), cases(LAYERED_FAMILIES, PAGE_SIZES, CHUNKS)
)
def test_appended_turns_give_the_logits_of_one_full_forward(
    family: str, page_size: int, chunk: int, oracle: Oracle
) -> None:
    directory = oracle.directory(family)
    oracle.talk(directory, page_size=page_size, chunk=chunk, layout=Layout.SCATTERED)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("family", LAYERED_FAMILIES)
def test_the_backends_of_torch_are_as_exact(
    family: str, backend: BackendName, oracle: Oracle
) -> None:
    directory = oracle.directory(family)
    oracle.talk(directory, page_size=4, chunk=7, layout=Layout.RUNS, backend=backend)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_five_turns_in_company_are_what_transformers_computes(
    case: Setup, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    talks = new_talks()
    run_talks(case, checkpoints[case.family], talks)
    for talk in talks:
        assert_like_reference(talk, references[case.family])


@pytest.mark.parametrize("family", [f for f in LAYERED_FAMILIES if f not in RECURRENT_FAMILIES])
def test_a_model_that_guesses_for_itself_is_right_in_every_pool(
    family: str, checkpoints: Mapping[str, Path], references: Mapping[str, Reference]
) -> None:
    speculation = Speculation(3, Drafter.MODEL)
    talks = new_talks()
    directory = checkpoints[family]
    case = Setup(family, 4, 7, True, max_total_tokens=96, speculation=speculation)
    counters = run_talks(case, directory, talks, draft=directory)
    for talk in talks:
        assert_like_reference(talk, references[family])
    assert counters.draft_tokens == counters.accepted_tokens > 20
    # Windows alone need so little that these pools may suffice.
    is_short = sum(talk.num_retractions for talk in talks) > 0
    assert is_short or FULL_POOL not in load_config(directory).pools, "no pool was ever short"


@pytest.mark.parametrize("backend", ["native", "cpu", "torch"])
@pytest.mark.parametrize("family", LAYERED_FAMILIES)
def test_halves_are_close(
    family: str, backend: BackendName, checkpoints: Mapping[str, Path]
) -> None:
    """A prompt past the window, in bf16 and in fp32."""
    directory = checkpoints[family]
    config = load_config(directory)
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, 50, dtype=np.int32)
    spoken = []
    for dtype in (torch.float32, torch.bfloat16):
        decoder = load_decoder(directory, config, device=torch.device("cpu"), dtype=dtype)
        spec = config.cache_spec(4, decoder.dtype_name)
        runner = ModelRunner(decoder, spec, capacity(config, 4), backend=backend)
        rows = Rows(runner, 4)
        spoken.append(runner.logits(rows.batch(rows.row(1, tokens))))
    exact, half = spoken
    assert 0 < (exact - half).norm() < 0.1 * exact.norm()


def test_checking_a_checkpoint_does_not_wake_the_compiler(
    checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    """Importing it takes a server two seconds, and it is for developers."""
    code = (
        "import sys; from pathlib import Path\n"
        "from session_server.models.registry import load_config\n"
        "from session_server.runner.checkpoint import Checkpoint\n"
        "from session_server.runner.weights import expected_tensors\n"
        "for path in map(Path, sys.argv[1:]):\n"
        "    assert expected_tensors(load_config(path), Checkpoint(path).tensors)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    packed = write_checkpoint("gpt_oss", tmp_path, hidden_size=64, intermediate_size=96)
    to_mxfp4(packed)
    directories = [packed, *(checkpoints[family] for family in LAYERED_FAMILIES)]
    subprocess.run([sys.executable, "-c", code, *directories], check=True)


def test_the_record_is_of_every_family_and_within_bounds() -> None:
    worst = recorded()
    assert list(worst) == [*FAMILIES, *LAYERED_FAMILIES]
    assert 0 < max(worst.values()) <= TOLERANCE


def test_stacked_experts_are_the_same_model(oracle: Oracle, tmp_path: Path) -> None:
    directory = write_checkpoint("qwen3_moe", tmp_path, mlp_only_layers=[])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{e}.{side}_proj.weight") for e in range(7)])
            for side in ("gate", "up", "down")
        )
        tensors[f"{prefix}gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{prefix}down_proj"] = down
    save_file(tensors, path, metadata={"format": "pt"})
    oracle.talk(directory, page_size=16, chunk=64)


def test_mxfp4_experts_are_dequantised(oracle: Oracle, tmp_path: Path) -> None:
    """The reference dequantises them itself."""
    directory = write_checkpoint("gpt_oss", tmp_path, hidden_size=64, intermediate_size=96)
    to_mxfp4(directory)
    oracle.talk(directory, page_size=16, chunk=64)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "qwen3_moe"])
def test_the_v4_spelling_is_the_same_model(model_type: str, oracle: Oracle, tmp_path: Path) -> None:
    directory = write_checkpoint(model_type, tmp_path)
    to_v4_style(directory)
    oracle.talk(directory, page_size=16, chunk=64)
