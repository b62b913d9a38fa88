"""Probes of models that keep states: a page is computed from the state before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cache.spec import Capacity
from cache.types import RowId, StateMoves
from session_server.core.batch import Batch, Probe
from session_server.models.config import FULL_POOL
from session_server.models.registry import load_config
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import BackendName
from session_server.runner.weights import load_decoder
from tests.depth import at_depth
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import RECURRENT_FAMILIES, write_checkpoint
from tests.runner.rows import Rows

PAGE_SIZE, LENGTH, ROW = 8, 20, 1


class Spoken:
    """One row, in launches of a page each; the states after each launch take turns on two pages."""

    def __init__(self, directory: Path, backend: BackendName = "auto") -> None:
        config = load_config(directory)
        decoder = load_decoder(directory, config, device=torch.device("cpu"), dtype=torch.float32)
        capacity = Capacity({FULL_POOL: 50}, 2, 160, num_states=9)
        spec = config.cache_spec(PAGE_SIZE, "float32")
        self.runner = ModelRunner(decoder, spec, capacity, backend=backend)
        rows = Rows(self.runner, PAGE_SIZE)
        self.tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, LENGTH, dtype=np.int32)
        self.states = [0]
        for start in range(0, LENGTH, PAGE_SIZE):
            row = rows.row(ROW, self.tokens[start : start + PAGE_SIZE], start=start)
            rows.run(row)
            assert row.states is not None
            self.states.append(row.states.targets[-1][1])

    def last_holds(self) -> bool | None:
        """Ask about the last page, from the state before it to the one after it."""
        start = LENGTH - LENGTH % PAGE_SIZE
        moves = StateMoves(self.states[-2], ((LENGTH, self.states[-1]),))
        probe = Probe(RowId(ROW), start, self.tokens[start:], moves)
        return self.runner.launch(Batch(0, (), (), probe)).wait().probe_holds


BACKENDS: list[tuple[str, BackendName]] = [(family, "auto") for family in RECURRENT_FAMILIES]
BY_TRITON = at_depth(RECURRENT_FAMILIES[:1], proof=RECURRENT_FAMILIES)


@pytest.fixture(params=[*BACKENDS, *((family, "triton") for family in BY_TRITON)], ids=str)
def spoken(request: pytest.FixtureRequest, tmp_path: Path) -> Spoken:
    family, backend = request.param
    if backend == "triton":
        pytest.importorskip("triton", reason="triton has no wheel for this machine")
    return Spoken(write_checkpoint(family, tmp_path), backend)


def test_an_honest_page_and_its_states_hold_and_stay_as_they_are(spoken: Spoken) -> None:
    assert spoken.runner.states is not None
    pages = spoken.states[1:]
    before = [part.clone() for page in pages for part in spoken.runner.states.page(page)]
    assert spoken.last_holds() is True
    assert spoken.last_holds() is True
    after = [part for page in pages for part in spoken.runner.states.page(page)]
    assert all(left.equal(right) for left, right in zip(before, after, strict=True))


@pytest.mark.parametrize("which", [-1, -2], ids=["after", "before"])
def test_a_damaged_state_is_found(which: int, spoken: Spoken) -> None:
    assert spoken.runner.states is not None
    for part in spoken.runner.states.page(spoken.states[which]):
        part[0] += 1.0
    assert spoken.last_holds() is False
