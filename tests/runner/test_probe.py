"""Level 3 on real models: what is right is never called wrong, what is wrong always is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.spec import Capacity
from cache.types import RowId, TableWrite, Tokens
from session_server.core.batch import Batch, Probe
from session_server.demo import MODEL_DIR, corpus
from session_server.models.config import FULL_POOL, DTypeName, KvDTypeName
from session_server.models.registry import load_config
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import BackendName
from session_server.runner.probe import TOLERANCES, deviation
from session_server.runner.weights import load_decoder
from tests.depth import at_depth
from tests.runner.rows import PAGES_PER_ROW, Rows
from tests.text.local_text import load_local_text

PAGE_SIZE = 16
LENGTH = 150
SHAPES: dict[int, tuple[int, ...]] = {
    1: (LENGTH,),
    2: (64, 64, 22),
    3: (7,) * 21 + (3,),
    4: (100,) + (1,) * 50,
}
"""Chunks in which each row's tokens are computed; the rows after them decode together."""

TOGETHER = (5, 6, 7)
DTYPES: list[tuple[DTypeName, KvDTypeName]] = [
    ("float32", "float32"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
]
"""What a model computes in, and what its KV is stored in."""

BACKENDS: tuple[BackendName, ...] = ("cpu", "torch")
VARIANTS = [(*dtypes, backend) for dtypes, backend in itertools.product(DTYPES, BACKENDS)]
EIGHT_BITS = at_depth(("fp8_e5m2",), proof=("fp8_e4m3", "fp8_e5m2"))
VARIANTS += [("bfloat16", kv_dtype, "torch") for kv_dtype in EIGHT_BITS]


class Conversations:
    """Rows of the embedded model that hold dialogues, computed in every kind of batch."""

    def __init__(self, dtype: DTypeName, kv_dtype: KvDTypeName, backend: BackendName) -> None:
        config = load_config(MODEL_DIR)
        decoder = load_decoder(
            MODEL_DIR, config, device=torch.device("cpu"), dtype=getattr(torch, dtype)
        )
        num_rows = len(SHAPES) + len(TOGETHER)
        capacity = Capacity({FULL_POOL: num_rows * PAGES_PER_ROW + 1}, num_rows, 1024)
        runner = ModelRunner(
            decoder, config.cache_spec(PAGE_SIZE, dtype, kv_dtype), capacity, backend=backend
        )
        self.rows = Rows(runner, PAGE_SIZE)
        self.tokens = {row: dialogue_tokens(row % 3) for row in (*SHAPES, *TOGETHER)}
        for row, chunks in SHAPES.items():
            self.rows.compute(row, self.tokens[row], chunks)
        for position in range(LENGTH):
            self.rows.run(
                *(
                    self.rows.row(row, self.tokens[row][position : position + 1], start=position)
                    for row in TOGETHER
                )
            )

    @property
    def storage(self) -> Tensor:
        """[layers, 2, kv_heads, pages, page_size, head_dim]."""
        return self.rows.runner.pools[FULL_POOL].storage

    def page(self, row: int, index: int) -> int:
        """Where a row's page lies."""
        return int(self.rows.runner._tables[FULL_POOL].pages(row, index + 1)[-1])

    def holds(self, row: int, index: int, num_tokens: int = PAGE_SIZE) -> bool:
        """Ask the device."""
        start = index * PAGE_SIZE
        probe = Probe(RowId(row), start, self.tokens[row][start : start + num_tokens])
        result = self.rows.runner.launch(Batch(0, (), (), probe)).wait()
        assert result.error is None, result.error
        assert result.rows == ()
        assert result.probe_holds is not None
        return result.probe_holds

    def probes(self) -> Iterator[tuple[int, int, int]]:
        """(row, page, tokens) of everything there is to look at."""
        for row, index in itertools.product(self.tokens, range(LENGTH // PAGE_SIZE + 1)):
            yield row, index, min(PAGE_SIZE, LENGTH - index * PAGE_SIZE)


def dialogue_tokens(seed: int) -> Tokens:
    """The first `LENGTH` tokens of a dialogue."""
    tokenizer = load_local_text(MODEL_DIR).tokenizer
    turns = corpus.dialogue(seed, 40).turns
    text = "\n".join(f"{turn.user} {turn.assistant}" for turn in turns)
    return np.array(tokenizer.encode_content(text)[:LENGTH], dtype=np.int32)


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def spoken(request: pytest.FixtureRequest) -> Conversations:
    return Conversations(*request.param)


def test_what_a_forward_of_any_shape_wrote_holds(spoken: Conversations) -> None:
    probes = list(spoken.probes())
    assert len(probes) == 70
    assert [probe for probe in probes if not spoken.holds(*probe)] == []


def test_the_part_of_a_tail_that_is_valid_is_enough(spoken: Conversations) -> None:
    tail = LENGTH // PAGE_SIZE
    unused = spoken.storage[:, :, :, spoken.page(1, tail), LENGTH % PAGE_SIZE :]
    unused.fill_(float("nan"))
    for num_tokens in range(1, LENGTH % PAGE_SIZE + 1):
        assert spoken.holds(1, tail, num_tokens)
    unused.zero_()


def test_honest_pages_are_far_from_the_tolerance_and_foreign_ones_far_beyond(
    spoken: Conversations,
) -> None:
    pool = spoken.rows.runner.pools[FULL_POOL]
    honest, foreign = 0.0, float("inf")
    for row, index, num_tokens in spoken.probes():
        assert spoken.holds(row, index, num_tokens)
        computed = pool.page(0, num_tokens)
        kept = pool.page(spoken.page(row, index), num_tokens)
        honest = max(honest, *largest(computed, kept))
        stranger = row + 1 if row < max(TOGETHER) else row - 1
        other = pool.page(spoken.page(stranger, index), num_tokens)
        foreign = min(foreign, max(largest(computed, other)))
    assert 3 * honest < TOLERANCES[pool.dtype] < foreign / 2


def largest(computed: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> list[float]:
    return [float(deviation(*sides).max()) for sides in zip(computed, kept, strict=True)]


def test_a_probe_writes_nothing_but_the_padding_page(spoken: Conversations) -> None:
    before = spoken.storage.clone()
    assert spoken.holds(3, 4)
    assert before[:, :, :, 1:].equal(spoken.storage[:, :, :, 1:])
    assert not before[:, :, :, 0].equal(spoken.storage[:, :, :, 0])


def _garbage(storage: Tensor, page: int, other: int) -> None:
    storage[:, :, :, page] = torch.randn(storage[:, :, :, page].shape).to(storage.dtype)


def _not_a_number(storage: Tensor, page: int, other: int) -> None:
    storage[1, 0, 0, page, 5, 3] = float("nan")


def _never_written(storage: Tensor, page: int, other: int) -> None:
    storage[:, :, :, page] = 0.0


def _shifted_by_one(storage: Tensor, page: int, other: int) -> None:
    storage[:, :, :, page] = storage[:, :, :, page].roll(1, dims=3)


def _other_content(storage: Tensor, page: int, other: int) -> None:
    storage[:, :, :, page] = storage[:, :, :, other]


def _one_layer(storage: Tensor, page: int, other: int) -> None:
    storage[2, :, :, page] = storage[2, :, :, other]


def _values_of_the_last_layer(storage: Tensor, page: int, other: int) -> None:
    storage[-1, 1, :, page] = storage[-1, 1, :, other]


CORRUPTIONS: list[Callable[[Tensor, int, int], None]] = [
    _garbage,
    _not_a_number,
    _never_written,
    _shifted_by_one,
    _other_content,
    _one_layer,
    _values_of_the_last_layer,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda function: function.__name__[1:])
@pytest.mark.parametrize(("row", "index"), [(1, 0), (2, 3), (5, 8)])
def test_a_page_that_holds_something_else_is_found(
    spoken: Conversations, corrupt: Callable[[Tensor, int, int], None], row: int, index: int
) -> None:
    page, other = spoken.page(row, index), spoken.page(row + 1, index)
    whole = spoken.storage[:, :, :, page].clone()
    corrupt(spoken.storage, page, other)
    assert not spoken.holds(row, index)
    assert spoken.holds(row + 1, index)
    spoken.storage[:, :, :, page] = whole
    assert spoken.holds(row, index)


def test_two_pages_swapped_in_the_table_are_found_at_both(spoken: Conversations) -> None:
    pages = [spoken.page(2, index) for index in (3, 4)]

    def point(first: int, second: int) -> None:
        write = TableWrite(FULL_POOL, RowId(2), 3, np.array([first, second], dtype=np.int32))
        spoken.rows.runner.launch(Batch(0, (), (write,)))

    point(*pages[::-1])
    # Keys carry their position and attention adds up in any order: who reads both is not misled.
    assert [spoken.holds(2, index) for index in range(6)] == [True, True, True, False, False, True]
    point(*pages)
    assert all(spoken.holds(2, index) for index in range(6))
