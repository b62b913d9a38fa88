"""Forwards that decode, replayed from graphs, say what they say without: on a recording fake of the
CUDA API, with the kernels in Triton's interpreter; with TEST_DEVICE=cuda on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.spec import Capacity
from cache.types import TurnId
from session_server.core.batch import Batch, DecodeRows
from session_server.models.registry import load_config
from session_server.runner import decode_graphs
from session_server.runner.decode_graphs import CudaGraphs, DecodeGraphs, GraphApi, bucket_sizes
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import BackendName
from session_server.runner.weights import load_decoder
from tests.gpu.recorded_graphs import NotCapturableError, RecordedGraphs
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.device import DEVICE
from tests.runner.rows import PAGES_PER_ROW, Rows
from tests.runner.test_model_runner import prompt

pytest.importorskip("triton", reason="triton has no wheel for this machine")

PAGE_SIZE = 16
NUM_ROWS = 6
LARGEST = 4
ATOL = 1e-5 if DEVICE.type == "cpu" else 1e-3
"""cuBLAS may take another kernel for another number of rows."""

DENSE = {"first_k_dense_replace": 2, "num_hidden_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 2},
    "gemma3_text": {"num_hidden_layers": 3},
    "deepseek_v3": DENSE,
}
PROMPTS = {1: 20, 2: 3, 3: 37, 4: 16, 5: 1}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param
    return write_checkpoint(family, tmp_path_factory.mktemp(family), **FAMILIES[family])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen"), num_hidden_layers=1)


@pytest.fixture
def api() -> Iterator[GraphApi]:
    if DEVICE.type == "cuda":
        yield CudaGraphs(DEVICE)
        return
    with pytest.MonkeyPatch.context() as patch:
        yield RecordedGraphs(patch)


only_recorded = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="on a GPU a bug is a wild read: the fake is there to find it"
)


def runner_of(checkpoint: Path, backend: BackendName = "triton") -> ModelRunner:
    config = load_config(checkpoint)
    decoder = load_decoder(checkpoint, config, device=DEVICE, dtype=torch.float32)
    pages = dict.fromkeys(config.pools, NUM_ROWS * PAGES_PER_ROW + 1)
    capacity = Capacity(pages, NUM_ROWS, PAGES_PER_ROW * PAGE_SIZE, num_states=2)
    return ModelRunner(decoder, config.cache_spec(PAGE_SIZE, "float32"), capacity, backend=backend)


class Talk:
    """Rows that have read their prompts, and decode together."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.rows = Rows(runner, PAGE_SIZE)
        self.lengths: dict[int, int] = {}
        self.num_steps = 0
        self.read(PROMPTS)

    def read(self, prompts: dict[int, int]) -> None:
        """Begin rows, or begin them anew with others' tokens in their pages."""
        tokens = [
            self.rows.row(row, prompt(length, row + length)) for row, length in prompts.items()
        ]
        self.rows.run(*tokens)
        self.lengths |= prompts

    def batch(self, *rows: int) -> Batch:
        ids = np.array(rows, dtype=np.int32)
        starts = np.array([self.lengths[row] for row in rows], dtype=np.int32)
        names = tuple(TurnId(f"turn-{row}") for row in rows)
        self.num_steps += 1
        decoding = DecodeRows(names, (0,) * len(rows), ids, starts, None)
        return Batch(100 + self.num_steps, (), (), decoding=decoding)

    def step(self, *rows: int) -> tuple[int, ...]:
        """One token of each row, greedily."""
        tokens = self.runner.launch(self.batch(*rows)).wait().tokens
        assert tokens is not None
        for row in rows:
            self.lengths[row] += 1
        return tokens

    def stored(self) -> list[Tensor]:
        """What lies in every pool but for page 0."""
        stored = []
        for pool in self.runner.pools.values():
            pages = pool.storage.movedim(pool.page_axis, 0)
            stored.append(pages[1:].clone())
        return stored


STEPS = ((1, 2, 3, 4), (2,), (3, 1, 4), (5, 4), (1, 2, 3), (5,), (4, 3, 2, 1), (1, 5, 2))
ANEW = {3: 60}
"""The longest row begins anew before the last step, in which it is not: what is padded is where it
was."""


def assert_alike(graphed: Talk, eager: Talk) -> None:
    """Every step says the same, and stores the same."""
    for rows in STEPS:
        if rows == STEPS[-1]:
            graphed.read(ANEW)
            eager.read(ANEW)
        logits = [talk.runner.logits(talk.batch(*rows)) for talk in (graphed, eager)]
        torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=ATOL)
        assert graphed.step(*rows) == eager.step(*rows), rows
        for ours, theirs in zip(graphed.stored(), eager.stored(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL)


def test_a_replay_says_and_stores_what_a_forward_does(checkpoint: Path, api: GraphApi) -> None:
    """Of batches in any order and of any size; what is padded is stored in page 0 alone."""
    graphed, eager = Talk(runner_of(checkpoint)), Talk(runner_of(checkpoint, "torch"))
    sizes: list[int] = []
    assert graphed.runner.capture_graphs(LARGEST, api, on_progress=sizes.append) is None
    assert sizes == [4, 2, 1]
    assert_alike(graphed, eager)
    graphs = graphed.runner.graphs
    assert graphs is not None
    assert graphs.num_replays == 2 * len(STEPS)
    assert graphs.fallbacks == {"not only decode": 1}


def test_what_no_graph_computes_is_computed_without_and_counted(qwen: Path, api: GraphApi) -> None:
    runner = runner_of(qwen)
    assert runner.capture_graphs(2, api) is None
    talk = Talk(runner)  # its prompts are no decode
    assert len(talk.step(1, 2, 3)) == 3
    assert len(talk.step(1, 2)) == 2
    assert runner.graphs is not None
    assert runner.graphs.num_replays == 1
    assert runner.graphs.fallbacks == {
        "not only decode": 1,
        "more rows than the largest graph": 1,
    }


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("deepseek_v3", "the host counts which experts are chosen"),
        ("lfm2", "recurrent states are planned on the host"),
        ("qwen3", "the backend torch plans each batch on the host"),
    ],
)
def test_what_cannot_be_captured_says_why(
    family: str, why: str, tmp_path: Path, api: GraphApi
) -> None:
    checkpoint = write_checkpoint(family, tmp_path / family)
    runner = runner_of(checkpoint, "torch" if "torch" in why else "triton")
    assert runner.capture_graphs(LARGEST, api) == why
    assert runner.graphs is None


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 16, 50, 64, 65, 200])
def test_buckets_hold_the_largest_batch_and_pad_little(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert list(sizes) == sorted({*sizes})
    assert largest <= sizes[-1] <= largest + 15
    for num_rows in range(1, largest + 1):
        padded = next(size for size in sizes if size >= num_rows)
        assert padded < 2 * num_rows or padded - num_rows < 16


@only_recorded
def test_the_fake_finds_what_a_graph_cannot_do(api: GraphApi) -> None:
    x, out = torch.ones(4), torch.zeros(4)
    held = [torch.ones(4)]
    with pytest.raises(NotCapturableError, match="the host reads"):
        api.capture(lambda: out.add_(x[0].item()))
    with pytest.raises(NotCapturableError, match="come from the host"):
        api.capture(lambda: out.add_(torch.from_numpy(np.ones(4, np.float32))))
    graph = api.capture(lambda: out.add_(held[0]))
    graph.replay()
    held.clear()
    with pytest.raises(NotCapturableError, match="is gone"):
        graph.replay()


Seed = Callable[[pytest.MonkeyPatch], None]


def _replaced(name: str, with_: str) -> Seed:
    """A line of `DecodeGraphs`' module in place of another."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        source = Path(decode_graphs.__file__).read_text("utf-8")
        assert source.count(name) == 1, name
        module: dict[str, Any] = {"__name__": decode_graphs.__name__}
        exec(compile(source.replace(name, with_), decode_graphs.__file__, "exec"), module)
        for method in ("_captured", "forward", "capture"):
            patch.setattr(DecodeGraphs, method, getattr(module["DecodeGraphs"], method))

    return seed


def _of_tiles(column: int) -> Seed:
    """A column of the tables that stays as it was captured."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        from session_server.attention.triton.backend import TritonDecodePlan

        refresh = TritonDecodePlan.refresh

        def partly(self: TritonDecodePlan, rows: Tensor, positions: Tensor) -> None:
            before = self.tiles[:, column].clone()
            refresh(self, rows, positions)
            self.tiles[:, column] = before

        patch.setattr(TritonDecodePlan, "refresh", partly)

    return seed


BUGS: dict[str, Seed] = {
    "padding keeps the slots of an earlier batch": _replaced(
        "        bucket.inputs[:, num_rows:].zero_()\n", ""
    ),
    "inputs are copied behind the replay": _replaced(
        "        bucket.inputs[:, :num_rows] = decoding\n"
        "        bucket.inputs[:, num_rows:].zero_()\n"
        "        bucket.graph.replay()\n",
        "        bucket.graph.replay()\n"
        "        bucket.inputs[:, :num_rows] = decoding\n"
        "        bucket.inputs[:, num_rows:].zero_()\n",
    ),
    "nothing is replayed": _replaced("        bucket.graph.replay()\n", ""),
    "the order of the batch is forgotten": _replaced(
        "logits_indices=logits_indices\n", "logits_indices=None\n"
    ),
    "the tables' rows are not refreshed": _of_tiles(0),
    "positions are not refreshed": _of_tiles(1),
    "attention is refreshed before the capture alone": _replaced(
        "            for plan in plans.values():\n                plan.refresh(rows, positions)\n",
        "",
    ),
    "a token does not attend to itself": _replaced(
        "plan.refresh(rows, positions)", "plan.refresh(rows, positions - 1)"
    ),
    "slots of a batch that is over are captured": _replaced(
        "for pool, slots in zip(self._pools, slot_mappings, strict=True)",
        "for pool, slots in zip(self._pools, [s.clone() for s in slot_mappings], strict=True)",
    ),
    "token ids of a batch that is over are captured": _replaced(
        "token_ids, positions, rows, *slot_mappings, logits_indices = inputs.unbind(0)\n",
        "token_ids, positions, rows, *slot_mappings, logits_indices = inputs.unbind(0)\n"
        "        token_ids = token_ids.clone()\n",
    ),
    "the next smaller graph is taken": _replaced(
        "each.inputs.shape[1] >= num_rows), None)",
        "2 * each.inputs.shape[1] >= num_rows), None)",
    ),
    "the smallest graph's result is given": _replaced(
        "return bucket.graph.out[:num_rows]", "return self._buckets[-1].graph.out[:num_rows]"
    ),
    "the last rows of the graph are given": _replaced(
        "bucket.graph.out[:num_rows]", "bucket.graph.out[-num_rows:]"
    ),
    "the host reads the longest position": _replaced(
        "            for plan in plans.values():\n",
        "            positions.max().item()\n            for plan in plans.values():\n",
    ),
    "positions come from the host": _replaced(
        "            for plan in plans.values():\n",
        "            positions.copy_(torch.from_numpy(positions.numpy() + 0))\n"
        "            for plan in plans.values():\n",
    ),
    "the tables of tiles are not kept": _replaced(
        "_Bucket(inputs, plans, ", "_Bucket(inputs, {}, "
    ),
    "inputs are replaced, not written": _replaced(
        "        bucket.inputs[:, :num_rows] = decoding\n",
        "        bucket = _Bucket(bucket.inputs.clone(), {}, bucket.graph)\n"
        "        bucket.inputs[:, :num_rows] = decoding\n",
    ),
}


@only_recorded
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str, qwen: Path, api: GraphApi) -> None:
    graphed, eager = Talk(runner_of(qwen)), Talk(runner_of(qwen, "torch"))

    def try_it() -> None:
        graphed.runner.capture_graphs(LARGEST, api)
        assert_alike(graphed, eager)

    with pytest.MonkeyPatch.context() as patch:
        BUGS[name](patch)
        with pytest.raises((AssertionError, NotCapturableError, RuntimeError)):
            try_it()
    assert len(BUGS) >= 15
