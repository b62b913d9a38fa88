"""From a directory to a runner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from session_server.demo import MODEL_DIR
from session_server.models.errors import CheckpointError
from session_server.runner.loader import RunnerOptions, choose_device, choose_dtype, load_runner
from tests.runner.rows import Rows


def test_the_embedded_model_loads_through_the_path_of_any_checkpoint() -> None:
    loaded = load_runner(MODEL_DIR, RunnerOptions(page_size=16, num_rows=2, device="cpu"))
    assert loaded.dtype == "float32"
    assert loaded.plan.capacity.max_context_len == loaded.config.max_context_len
    assert loaded.runner.pool.num_pages == loaded.plan.capacity.num_pages[loaded.runner.pool.name]


def test_the_context_can_be_shortened_but_not_stretched() -> None:
    for asked, expected in ((100, 100), (1 << 20, 4096)):
        options = RunnerOptions(page_size=16, num_rows=1, device="cpu", max_context_len=asked)
        assert load_runner(MODEL_DIR, options).plan.capacity.max_context_len == expected


def test_no_checkpoint_no_runner(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load_runner(tmp_path, RunnerOptions(page_size=16, num_rows=1))


def test_auto_is_a_gpu_where_there_is_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device("auto").type == expected


@pytest.mark.parametrize("name", ["tpu9", "", "gpu"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="known: auto"):
        choose_device(name)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        assert choose_device("cuda").type == "cuda"
    else:
        with pytest.raises(ValueError, match="sees no CUDA device"):
            choose_device("cuda:0")


def test_auto_dtype_is_what_the_device_computes_fast() -> None:
    assert choose_dtype("auto", torch.device("cpu")) == "float32"
    assert choose_dtype("auto", torch.device("cuda")) == "bfloat16"
    assert choose_dtype("float16", torch.device("cpu")) == "float16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_on_a_cpu_are_slow_but_close(dtype: str) -> None:
    def prompt_logits(name: str) -> torch.Tensor:
        options = RunnerOptions(
            page_size=16, num_rows=2, device="cpu", dtype=name, max_context_len=64, backend="torch"
        )
        rows = Rows(load_runner(MODEL_DIR, options).runner, page_size=16)
        tokens = np.arange(20, 50, dtype=np.int32)
        return rows.runner.logits(rows.batch(rows.row(1, tokens))).log_softmax(-1)

    exact, half = prompt_logits("float32"), prompt_logits(dtype)
    assert half.dtype == torch.float32
    assert (half.exp() - exact.exp()).abs().max().item() < 0.05
