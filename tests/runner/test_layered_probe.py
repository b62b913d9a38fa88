"""Probes of a model that keeps its KV in two pools, one of which is bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cache.spec import Capacity
from cache.types import PoolName, RowId
from session_server.core.batch import Batch, Probe
from session_server.models.config import FULL_POOL, WINDOW_POOL
from session_server.models.registry import load_config
from session_server.runner.model_runner import BackendName, ModelRunner
from session_server.runner.weights import load_decoder
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import write_checkpoint
from tests.runner.rows import Rows

PAGE_SIZE = 4
LENGTH = 50
ROW = 1


class Spoken:
    """One row of `LENGTH` tokens."""

    def __init__(self, directory: Path, backend: BackendName) -> None:
        config = load_config(directory)
        decoder = load_decoder(directory, config, device=torch.device("cpu"), dtype=torch.float32)
        capacity = Capacity(dict.fromkeys(config.pools, 50), 2, 80)
        spec = config.cache_spec(PAGE_SIZE, "float32")
        self.runner = ModelRunner(decoder, spec, capacity, backend=backend)
        rows = Rows(self.runner, PAGE_SIZE)
        self.tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, LENGTH, dtype=np.int32)
        for start in range(0, LENGTH, 7):
            rows.run(rows.row(ROW, self.tokens[start : start + 7], start=start))

    def holds(self, index: int) -> bool | None:
        """Ask the device about one page."""
        start = index * PAGE_SIZE
        probe = Probe(RowId(ROW), start, self.tokens[start : start + PAGE_SIZE])
        return self.runner.launch(Batch(0, (), (), probe)).wait().probe_holds

    def page(self, pool: PoolName, index: int) -> int:
        """Where a page lies."""
        return int(self.runner._tables[pool].pages(ROW, index + 1)[-1])


@pytest.fixture(params=["cpu", "torch"])
def spoken(request: pytest.FixtureRequest, tmp_path: Path) -> Spoken:
    return Spoken(write_checkpoint("gemma2", tmp_path), request.param)


def test_honest_pages_hold(spoken: Spoken) -> None:
    assert [spoken.holds(index) for index in range(LENGTH // PAGE_SIZE)] == [True] * 12


@pytest.mark.parametrize("pool", [FULL_POOL, WINDOW_POOL])
def test_a_damaged_page_is_found_in_either_pool(pool: PoolName, spoken: Spoken) -> None:
    spoken.runner.pools[pool].page(spoken.page(pool, 9), PAGE_SIZE)[1][-1] += 1.0
    assert spoken.holds(9) is False
    assert spoken.holds(8) is True
