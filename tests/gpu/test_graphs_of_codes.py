"""Graphs of models whose weights are codes and whose KV is in 8-bit floats say what forwards do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache.spec import Capacity
from session_server.core.batch import GraphUse
from session_server.models.config import KvDTypeName
from session_server.models.registry import load_config
from session_server.runner.decode_graphs import GraphApi
from session_server.runner.graph_sizes import graph_sizes
from session_server.runner.loader import layer_factories
from session_server.runner.model_runner import ModelRunner
from session_server.runner.weights import load_decoder
from tests.depth import IS_PROOF
from tests.gpu.test_decode_graphs import NUM_ROWS, PAGE_SIZE, Step, Talk, api
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.device import DEVICE
from tests.oracle.test_packed import FORMATS, SIZES, write_experts
from tests.runner.rows import PAGES_PER_ROW
from tests.runner.test_fp8 import write_twins

__all__ = ["api"]

pytestmark = pytest.mark.skipif(not IS_PROOF, reason="models in the interpreter: PROVE=1")

STEPS: tuple[Step, ...] = ({1: 0, 2: 0}, {2: 0})


def runner_of(checkpoint: Path, kv_dtype: KvDTypeName) -> ModelRunner:
    config = load_config(checkpoint)
    decoder = load_decoder(
        checkpoint,
        config,
        device=DEVICE,
        dtype=torch.float32,
        factories=layer_factories("triton", "float32"),
    )
    pages = dict.fromkeys(config.pools, NUM_ROWS * PAGES_PER_ROW + 1)
    capacity = Capacity(pages, NUM_ROWS, PAGES_PER_ROW * PAGE_SIZE)
    spec = config.cache_spec(PAGE_SIZE, "float32", kv_dtype)
    return ModelRunner(decoder, spec, capacity, backend="triton")


# Rows of padding attend to nothing: they have what was in memory, and nobody reads them.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("weights", "kv_dtype"),
    [
        ("awq", "fp8_e4m3"),
        ("fp8", "fp8_e5m2"),
        ("experts", "float32"),
        ("int_8_by_token", "float32"),
    ],
)
def test_a_replay_says_what_a_forward_does(
    weights: str, kv_dtype: KvDTypeName, tmp_path: Path, api: GraphApi
) -> None:
    if weights == "fp8":
        path, _ = write_twins("qwen3", tmp_path, hidden_size=160)
    elif weights == "experts":
        twin = write_experts(tmp_path / "twin", num_hidden_layers=1, num_experts=4)
        path = FORMATS["gptq"].write(twin, tmp_path / "packed")
    else:
        twin = write_checkpoint("qwen2", tmp_path / "twin", num_hidden_layers=1, **SIZES)
        path = FORMATS[weights].write(twin, tmp_path / "packed")
    graphed, eager = (Talk(runner_of(path, kv_dtype)) for _ in range(2))
    assert graphed.runner.capture_graphs(graph_sizes(2, 0), api) is None
    for step in STEPS:
        ours, theirs = (talk.runner.logits(talk.batch(step)) for talk in (graphed, eager))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
        assert graphed.step(step) == eager.step(step)
    graphs = graphed.runner.graphs
    assert graphs is not None
    assert graphs.uses[GraphUse.REPLAYED] == 2 * len(STEPS)
