"""What a step asks of the kernels, and what they do between steps."""

from __future__ import annotations

import cProfile
import pstats
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.spec import Capacity
from session_server.models.config import FULL_POOL
from session_server.models.registry import load_config
from session_server.runner.model_runner import ModelRunner
from session_server.runner.native import _native
from session_server.runner.weights import load_decoder
from tests.oracle.checkpoints import write_checkpoint
from tests.runner.rows import Rows

PROMPT = np.arange(5, 25, dtype=np.int32)


def rows_of(directory: Path, *, num_layers: int) -> Rows:
    checkpoint = write_checkpoint("qwen3", directory, num_hidden_layers=num_layers)
    config = load_config(checkpoint)
    decoder = load_decoder(checkpoint, config, device=torch.device("cpu"), dtype=torch.float32)
    capacity = Capacity({FULL_POOL: 100}, 8, 200)
    return Rows(ModelRunner(decoder, config.cache_spec(16, "float32"), capacity), 16, 6)


def calls_of_a_step(rows: Rows, num_rows: int) -> int:
    """Functions that a decode step calls, Python's and built-in ones."""
    for row in range(1, num_rows + 1):
        rows.run(rows.row(row, PROMPT))
    batch = rows.batch(*(rows.row(row, None, start=len(PROMPT)) for row in range(1, num_rows + 1)))
    profile = cProfile.Profile()
    profile.runcall(lambda: rows.runner.launch(batch).wait())
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_a_step_calls_as_much_whatever_the_number_of_layers(tmp_path: Path) -> None:
    few, many = (
        calls_of_a_step(rows_of(tmp_path / str(layers), num_layers=layers), 4) for layers in (2, 9)
    )
    assert few == many
    assert few < 400


def test_a_row_more_costs_a_few_calls(tmp_path: Path) -> None:
    two, six = (
        calls_of_a_step(rows_of(tmp_path / str(count), num_layers=2), count) for count in (2, 6)
    )
    assert (six - two) / 4 < 40


def test_threads_sleep_between_steps(tmp_path: Path) -> None:
    before = _native.num_threads()
    _native.set_num_threads(4)
    rows = rows_of(tmp_path, num_layers=2)
    # Large enough that a forward is shared.
    weight = torch.randn(2048, 1024)
    linear = _native.Linear(weight, "float32")
    y = np.empty((1, 2048), dtype=np.float32)
    for _ in range(3):
        linear.apply(np.ones((1, 1024), dtype=np.float32), y)
        rows.run(rows.row(1, PROMPT))
    time.sleep(0.05)
    used = time.process_time()
    time.sleep(0.4)
    # Four threads that spin would have used as much as there are cores: 0.4 s or more.
    assert time.process_time() - used < 0.1
    _native.set_num_threads(before)


def test_a_token_outside_of_the_vocabulary_fails_the_step_and_nothing_else(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, num_layers=2)
    for token in (-1, 1 << 20):
        row = rows.row(1, np.array([5, token], dtype=np.int32))
        result = rows.runner.launch(rows.batch(row)).wait()
        assert result.error == "IndexError: a token id lies outside of the vocabulary"
    (after,) = rows.run(rows.row(1, PROMPT))
    assert after.finite


def test_a_team_has_a_thread() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        _native.set_num_threads(0)
