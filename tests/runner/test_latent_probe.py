"""Level 3 on latents: what is right is never called wrong, what is wrong always is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.pool.mla import MlaPool
from cache.spec import Capacity
from cache.types import RowId
from session_server.core.batch import Batch, Probe
from session_server.models.config import LATENT_POOL, DTypeName, KvDTypeName
from session_server.models.registry import load_config
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import BackendName
from session_server.runner.weights import load_decoder
from tests.depth import at_depth
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import write_checkpoint
from tests.runner.rows import PAGES_PER_ROW, Rows

PAGE_SIZE = 16
LENGTH = 56
RANK = 20
SHAPES: dict[int, tuple[int, ...]] = {1: (LENGTH,), 2: (7,) * 8, 3: (40,) + (1,) * 16}
"""Chunks in which each row's tokens are computed: expanded, absorbed, both."""

DTYPES: list[tuple[DTypeName, KvDTypeName]] = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
]
"""What a model computes in, and what its latents are stored in."""

BACKENDS: tuple[BackendName, ...] = ("cpu", "torch")
VARIANTS = [(*dtypes, backend) for dtypes, backend in itertools.product(DTYPES, BACKENDS)]
EIGHT_BITS = at_depth((), proof=("fp8_e4m3", "fp8_e5m2"))
VARIANTS += [("bfloat16", kv_dtype, "torch") for kv_dtype in EIGHT_BITS]


class Spoken:
    """Rows of random tokens. Only the lowest layers, which have no experts: half precision may
    send a token to another expert when it is computed again."""

    def __init__(
        self,
        dtype: DTypeName,
        kv_dtype: KvDTypeName,
        backend: BackendName,
        root: pytest.TempPathFactory,
    ) -> None:
        directory = write_checkpoint(
            "deepseek_v3", root.mktemp("latent"), first_k_dense_replace=3, std=0.08
        )
        config = load_config(directory)
        decoder = load_decoder(
            directory, config, device=torch.device("cpu"), dtype=getattr(torch, dtype)
        )
        capacity = Capacity({LATENT_POOL: len(SHAPES) * PAGES_PER_ROW + 1}, len(SHAPES), 1024)
        spec = config.cache_spec(PAGE_SIZE, dtype, kv_dtype)
        self.rows = Rows(ModelRunner(decoder, spec, capacity, backend=backend), PAGE_SIZE)
        random = np.random.default_rng(1)
        self.tokens = {
            row: random.integers(0, VOCAB_SIZE, LENGTH).astype(np.int32) for row in SHAPES
        }
        for row, chunks in SHAPES.items():
            self.rows.compute(row, self.tokens[row], chunks)

    @property
    def storage(self) -> Tensor:
        """[layers, pages, page_size, latent + rope]."""
        pool = self.rows.runner.pools[LATENT_POOL]
        assert isinstance(pool, MlaPool)
        return pool.storage

    def page(self, row: int, index: int) -> int:
        return int(self.rows.runner._tables[LATENT_POOL].pages(row, index + 1)[-1])

    def holds(self, row: int, index: int) -> bool:
        start = index * PAGE_SIZE
        probe = Probe(RowId(row), start, self.tokens[row][start : start + PAGE_SIZE])
        result = self.rows.runner.launch(Batch(0, (), (), probe)).wait()
        assert result.error is None, result.error
        assert result.probe_holds is not None
        return result.probe_holds


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def spoken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Spoken:
    return Spoken(*request.param, tmp_path_factory)


def test_what_a_forward_of_any_shape_wrote_holds(spoken: Spoken) -> None:
    pages = list(itertools.product(SHAPES, range(LENGTH // PAGE_SIZE + 1)))
    assert len(pages) == 12
    assert [page for page in pages if not spoken.holds(*page)] == []


def _garbage(storage: Tensor, page: int, other: int) -> None:
    storage[:, page] = torch.randn(storage[:, page].shape).to(storage.dtype)


def _not_a_number(storage: Tensor, page: int, other: int) -> None:
    storage[1, page, 5, RANK + 3] = float("nan")


def _never_written(storage: Tensor, page: int, other: int) -> None:
    storage[:, page] = 0.0


def _shifted_by_one(storage: Tensor, page: int, other: int) -> None:
    storage[:, page] = storage[:, page].roll(1, dims=1)


def _other_content(storage: Tensor, page: int, other: int) -> None:
    storage[:, page] = storage[:, other]


def _latents_of_the_last_layer(storage: Tensor, page: int, other: int) -> None:
    storage[-1, page, :, :RANK] = storage[-1, other, :, :RANK]


def _rotary_keys_of_the_first_layer(storage: Tensor, page: int, other: int) -> None:
    storage[0, page, :, RANK:] = storage[0, other, :, RANK:]


CORRUPTIONS: list[Callable[[Tensor, int, int], None]] = [
    _garbage,
    _not_a_number,
    _never_written,
    _shifted_by_one,
    _other_content,
    _latents_of_the_last_layer,
    _rotary_keys_of_the_first_layer,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda function: function.__name__[1:])
def test_a_page_that_holds_something_else_is_found(
    spoken: Spoken, corrupt: Callable[[Tensor, int, int], None]
) -> None:
    page, other = spoken.page(1, 1), spoken.page(2, 1)
    whole = spoken.storage[:, page].clone()
    corrupt(spoken.storage, page, other)
    assert not spoken.holds(1, 1)
    assert spoken.holds(2, 1)
    spoken.storage[:, page] = whole
    assert spoken.holds(1, 1)


def test_a_probe_writes_nothing_but_the_padding_page(spoken: Spoken) -> None:
    before = spoken.storage.clone()
    assert spoken.holds(3, 2)
    assert before[:, 1:].equal(spoken.storage[:, 1:])
    assert not before[:, 0].equal(spoken.storage[:, 0])
