"""Forwards that decode, replayed from graphs, say what they say without: on a recording fake of the
CUDA API, with the kernels in Triton's interpreter; with TEST_DEVICE=cuda on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from cache.spec import Capacity
from cache.types import NULL_PAGE, StateMoves, TurnId
from session_server.attention.base import DeviceRows
from session_server.core.batch import Batch, BatchRow, DecodeRows, GraphUse
from session_server.models.registry import load_config
from session_server.runner import decode_graphs
from session_server.runner import graph_sizes as sizes_module
from session_server.runner.decode_graphs import CudaGraphs, Graph, GraphApi
from session_server.runner.graph_sizes import (
    GraphSize,
    bucket_sizes,
    choose_size,
    graph_sizes,
)
from session_server.runner.loader import layer_factories
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import ComputeBackend
from session_server.runner.weights import load_decoder
from tests.depth import at_depth
from tests.gpu.recorded_graphs import NotCapturableError, RecordedGraphs
from tests.gpu.seeding import Seed, replaced
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.device import DEVICE
from tests.runner.rows import PAGES_PER_ROW, Rows
from tests.runner.test_model_runner import prompt

pytest.importorskip("triton", reason="triton has no wheel for this machine")

from session_server.runner.triton import fused

PAGE_SIZE = 16
NUM_ROWS = 6
ATOL = 5e-5 if DEVICE.type == "cpu" else 1e-3
"""cuBLAS may take another kernel for another number of rows."""

EXPERTS = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 1},
    "gemma3_text": {"num_hidden_layers": 3},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "deepseek_v3": EXPERTS | at_depth({"num_hidden_layers": 1}, proof={"num_hidden_layers": 2}),
    **at_depth(
        {},
        proof={
            "gpt_oss": {"num_hidden_layers": 2},
            "qwen3_5_text": {"num_hidden_layers": 4},
            "granitemoehybrid": {},
        },
    ),
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


Step = dict[int, int]
"""The rows of a step, in order, and how many drafts each has."""

only_recorded = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="on a GPU a bug is a wild read: the fake is there to find it"
)


def runner_of(
    checkpoint: Path,
    backend: ComputeBackend = "triton",
    *,
    loaded_for: ComputeBackend | None = None,
    num_pages: int = NUM_ROWS * PAGES_PER_ROW + 1,
) -> ModelRunner:
    config = load_config(checkpoint)
    factories = layer_factories(loaded_for or backend, "float32")
    decoder = load_decoder(
        checkpoint, config, device=DEVICE, dtype=torch.float32, factories=factories
    )
    pages = dict.fromkeys(config.pools, num_pages)
    capacity = Capacity(pages, NUM_ROWS, PAGES_PER_ROW * PAGE_SIZE, num_states=1 + NUM_ROWS * 4)
    return ModelRunner(decoder, config.cache_spec(PAGE_SIZE, "float32"), capacity, backend=backend)


class Talk:
    """Rows that have read their prompts, and decode together."""

    def __init__(self, runner: ModelRunner, prompts: dict[int, int] = PROMPTS) -> None:
        self.runner = runner
        self.rows = Rows(runner, PAGE_SIZE)
        self.lengths: dict[int, int] = {}
        self.sources: dict[int, int] = {}
        self.targets: dict[int, tuple[int, ...]] = {}
        self.num_steps = 0
        self.read(prompts)

    def read(self, prompts: dict[int, int]) -> None:
        """Begin rows, or begin them anew with others' tokens in their pages."""
        rows = [
            self.with_states(self.rows.row(row, prompt(length, row + length)), NULL_PAGE)
            for row, length in prompts.items()
        ]
        self.rows.run(*rows)
        self.sources |= {row: self.targets[row][0] for row in prompts if self.targets}
        self.lengths |= prompts

    def with_states(self, row: BatchRow, source: int) -> BatchRow:
        """A row that leaves its state behind its certain tokens and behind each draft, in pages of
        four that it does not read."""
        if self.runner.states is None:
            return row
        own = [page for page in range(4 * row.row - 3, 4 * row.row + 1) if page != source]
        first = row.start + row.num_tokens - row.num_drafts
        self.targets[row.row] = tuple(own[: 1 + row.num_drafts])
        targets = tuple(enumerate(self.targets[row.row], first))
        return structs.replace(row, states=StateMoves(source, targets))

    def batch(self, step: Step) -> Batch:
        """One token of each row, in columns where no row has drafts and the step is even."""
        self.num_steps += 1
        if any(step.values()) or self.num_steps % 2 or self.runner.states is not None:
            listed = [
                self.rows.row(
                    row,
                    None,
                    start=self.lengths[row],
                    drafts=prompt(num_drafts, row + self.lengths[row]) if num_drafts else 0,
                )
                for row, num_drafts in step.items()
            ]
            return self.rows.batch(
                *[self.with_states(row, self.sources.get(row.row, NULL_PAGE)) for row in listed]
            )
        ids = np.array([*step], dtype=np.int32)
        starts = np.array([self.lengths[row] for row in step], dtype=np.int32)
        names = tuple(TurnId(f"turn-{row}") for row in step)
        decoding = DecodeRows(names, (0,) * len(step), ids, starts, None)
        return Batch(100 + self.num_steps, (), (), decoding=decoding)

    def step(self, step: Step) -> list[tuple[int, ...]]:
        """What each row says, greedily: one token, and the drafts that it would have said."""
        result = self.runner.launch(self.batch(step)).wait()
        assert result.error is None
        said = [row.token_ids for row in result.row_results()]
        for row, tokens in zip(step, said, strict=True):
            self.lengths[row] += len(tokens)
            if row in self.targets:
                self.sources[row] = self.targets[row][len(tokens) - 1]
        return said

    def stored(self) -> list[Tensor]:
        """What lies in every pool but for page 0."""
        stored = []
        for pool in self.runner.pools.values():
            pages = pool.storage.movedim(pool.page_axis, 0)
            stored.append(pages[1:].clone())
        if (states := self.runner.states) is not None:
            stored += [part.movedim(states.page_axis, 0)[1:].clone() for part in states.storage]
        return stored


STEPS: tuple[Step, ...] = (
    {1: 0, 2: 0, 3: 0, 4: 0},
    {2: 0},
    {3: 0, 1: 0, 4: 0},
    {5: 0, 4: 0},
    {1: 0, 2: 0, 3: 0},
    {5: 0},
    {4: 0, 3: 0, 2: 0, 1: 0},
    {1: 0, 5: 0, 2: 0},
)
VERIFIED: tuple[Step, ...] = (
    {3: 2, 1: 0, 4: 1},
    {4: 2, 2: 2, 1: 2, 3: 2},
    {5: 1},
    {1: 0, 3: 1},
    {2: 0, 1: 0},
    {1: 0, 2: 0, 3: 0, 4: 1},
    {3: 2, 5: 2, 1: 1},
)
SOME_STEPS = (*STEPS[:4], STEPS[-1], *VERIFIED[:2], *VERIFIED[-2:])
SOME_SIZES = (GraphSize(1, 2), GraphSize(1, 4), GraphSize(3, 4))
ANEW = {3: 60}
"""The longest row begins anew before the last step, in which it is not: what is padded is where it
was."""


@dataclass(frozen=True)
class Told:
    """What one step says and leaves."""

    logits: Tensor
    tokens: list[tuple[int, ...]]
    stored: list[Tensor]


def told(talk: Talk, steps: tuple[Step, ...]) -> Iterator[Told]:
    """Take the steps, one by one."""
    for step in steps:
        if step is STEPS[-1]:
            talk.read(ANEW)
        logits = talk.runner.logits(talk.batch(step))
        yield Told(logits, talk.step(step), talk.stored())


def _noted(done: list[tuple[int, int]]) -> Callable[[int, int], None]:
    """Note what `capture_graphs` tells of its progress."""

    def note(num_done: int, num_wanted: int) -> None:
        done.append((num_done, num_wanted))

    return note


def assert_alike(graphed: Talk, expected: Iterable[Told], steps: tuple[Step, ...]) -> None:
    """Every step says the same, and stores the same."""
    for ours, theirs in zip(told(graphed, steps), expected, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=ATOL)
        assert ours.tokens == theirs.tokens
        for of_ours, of_theirs in zip(ours.stored, theirs.stored, strict=True):
            torch.testing.assert_close(of_ours, of_theirs, rtol=0, atol=ATOL)


def test_a_replay_says_and_stores_what_a_forward_does(checkpoint: Path, api: GraphApi) -> None:
    """Of batches in any order and of any size, with drafts and without; what is padded is stored in
    page 0 alone."""
    graphed, eager = Talk(runner_of(checkpoint)), Talk(runner_of(checkpoint, "torch"))
    done: list[tuple[int, int]] = []
    sizes = at_depth(SOME_SIZES, proof=graph_sizes(4, num_drafts=2))
    steps = at_depth(SOME_STEPS, proof=STEPS + VERIFIED)
    assert graphed.runner.capture_graphs(sizes, api, on_progress=_noted(done)) is None
    assert done == [(index, len(sizes)) for index in range(1, len(sizes) + 1)]
    assert_alike(graphed, told(eager, steps), steps)
    graphs = graphed.runner.graphs
    assert graphs is not None
    assert graphs.uses == {
        GraphUse.REPLAYED: 2 * len(steps),
        GraphUse.MANY_TOKENS: 1,  # the one that begins anew
    }


def test_what_no_graph_computes_is_computed_without_and_counted(qwen: Path, api: GraphApi) -> None:
    runner = runner_of(qwen)
    assert runner.capture_graphs(graph_sizes(2, 0), api) is None
    talk = Talk(runner)  # its prompts are no decode
    assert len(talk.step({1: 0, 2: 0, 3: 0})) == 3
    assert len(talk.step({1: 0, 2: 0})) == 2
    assert talk.step({1: 1, 2: 0})
    assert runner.graphs is not None
    assert runner.graphs.uses == {
        GraphUse.REPLAYED: 1,
        GraphUse.MANY_TOKENS: 2,
        GraphUse.MANY_ROWS: 1,
    }


def test_what_a_graph_would_pad_too_much_is_computed_without_and_counted(
    qwen: Path, api: GraphApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_are_free = functools.partial(choose_size, num_free=3)
    monkeypatch.setattr(decode_graphs, "choose_size", few_are_free)
    runner = runner_of(qwen)
    assert runner.capture_graphs((GraphSize(1, 2), GraphSize(3, 4)), api) is None
    talk, eager = Talk(runner), Talk(runner_of(qwen, "torch"))
    for step in ({1: 0, 2: 0, 3: 0}, {1: 0, 2: 0, 3: 0, 4: 1}, {1: 2, 2: 1, 3: 0}, {5: 0}):
        assert talk.step(step) == eager.step(step)
    assert runner.graphs is not None
    assert runner.graphs.uses == {
        GraphUse.MANY_TOKENS: 1,
        GraphUse.MUCH_PADDING: 2,  # of 3 and of 5 tokens to 12
        GraphUse.REPLAYED: 2,
    }


def test_graphs_are_planned_for_no_more_than_a_row_can_have(
    qwen: Path, api: GraphApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a pool has fewer pages than a row addresses, and where it has more."""
    from session_server.attention.triton.backend import TritonBackend

    plan_graph, told = TritonBackend.plan_graph, []

    def noted(self: TritonBackend, num_rows: int, most: int, longest: int) -> object:
        told.append(longest)
        return plan_graph(self, num_rows, most, longest)

    monkeypatch.setattr(TritonBackend, "plan_graph", noted)
    for num_pages in (3, NUM_ROWS * PAGES_PER_ROW + 1):
        runner = runner_of(qwen, num_pages=num_pages)
        assert runner.capture_graphs((GraphSize(1, 1),), api) is None
    assert told == [2 * PAGE_SIZE, PAGES_PER_ROW * PAGE_SIZE]


@pytest.mark.parametrize(
    ("num_rows", "num_drafts", "drafted", "expected"),
    [
        pytest.param(64, 4, 1, None, id="one row of many has a draft"),
        pytest.param(64, 16, 480, GraphSize(17, 64), id="as many tokens as are padded"),
        pytest.param(64, 16, 479, None, id="one token less"),
        pytest.param(64, 4, 96, GraphSize(5, 64), id="a draft and a half for each"),
        pytest.param(64, 3, 1, GraphSize(4, 64), id="as many tokens as take no time"),
        pytest.param(48, 4, 1, GraphSize(5, 48), id="fewer"),
        pytest.param(8, 16, 1, GraphSize(17, 8), id="few rows"),
        pytest.param(64, 16, 0, GraphSize(1, 64), id="no drafts"),
    ],
)
def test_a_graph_pads_what_takes_no_time_or_no_more_than_the_batch(
    num_rows: int, num_drafts: int, drafted: int, expected: GraphSize | None
) -> None:
    """Of sizes as they are by default; with drafts, one row has as many as may be."""
    most = 1 + num_drafts if drafted else 1
    sizes = graph_sizes(64, num_drafts)
    size, use = choose_size(sizes, num_rows, most, num_tokens=num_rows + drafted)
    assert size == expected
    assert use is (GraphUse.MUCH_PADDING if expected is None else GraphUse.REPLAYED)


def test_of_the_graphs_that_hold_a_batch_the_one_of_fewest_tokens_is_taken() -> None:
    """Though it is made for longer rows, where memory was missing for others."""
    sizes = (GraphSize(1, 64), GraphSize(3, 8), GraphSize(3, 16))
    assert choose_size(sizes, 6, 1, num_tokens=6) == (GraphSize(3, 8), GraphUse.REPLAYED)
    assert choose_size(sizes, 17, 2, num_tokens=34) == (None, GraphUse.MANY_ROWS)
    assert choose_size(sizes, 1, 4, num_tokens=4) == (None, GraphUse.MANY_TOKENS)


def test_a_size_that_memory_is_missing_for_is_left_out(qwen: Path, api: GraphApi) -> None:
    class Small:
        def capture(self, run: Callable[[], Tensor]) -> Graph:
            if len(run()) > 2:
                raise torch.OutOfMemoryError("a graph takes more than graphs may")
            return api.capture(run)

    runner, done = runner_of(qwen), []
    assert runner.capture_graphs(graph_sizes(4, 0), Small(), on_progress=_noted(done)) is None
    assert done == [(1, 3), (2, 3), (3, 3)]
    graphs = runner.graphs
    assert graphs is not None
    assert graphs.left_out == (GraphSize(1, 4),)
    talk = Talk(runner)
    assert len(talk.step({1: 0, 2: 0, 3: 0})) == 3
    assert len(talk.step({1: 0, 2: 0})) == 2
    assert (graphs.uses[GraphUse.MANY_ROWS], graphs.uses[GraphUse.REPLAYED]) == (1, 1)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("deepseek_v3", "the host counts which experts are chosen"),
        ("qwen3", "the backend torch plans each batch on the host"),
    ],
)
def test_what_cannot_be_captured_says_why(
    family: str, why: str, tmp_path: Path, api: GraphApi
) -> None:
    checkpoint = write_checkpoint(family, tmp_path / family)
    runner = runner_of(checkpoint, "torch" if "torch" in why else "triton", loaded_for="torch")
    assert runner.capture_graphs(SOME_SIZES, api) == why
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


def _replaced(text: str, with_: str) -> Seed:
    """Text of `DecodeGraphs`' module in place of other text."""
    methods = ("_captured", "forward", "capture", "_bucket_of")
    names = (*(f"DecodeGraphs.{method}" for method in methods), "_copy_padded")
    return replaced(decode_graphs, text, with_, *names)


def _of_tiles(column: int) -> Seed:
    """A column of the tables that stays as it was captured."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        from session_server.attention.triton.backend import TritonGraphPlan

        refresh = TritonGraphPlan.refresh

        def partly(self: TritonGraphPlan, rows: DeviceRows) -> None:
            before = self.tiles[:, column].clone()
            refresh(self, rows)
            self.tiles[:, column] = before

        patch.setattr(TritonGraphPlan, "refresh", partly)

    return seed


COPIES = (
    "        _copy_padded(bucket.by_token, inputs.by_token)\n"
    "        _copy_padded(bucket.by_row, inputs.by_row)\n"
)
UNPADDED = (
    "        stale = bucket.by_{0}.clone()\n" + COPIES + "        n = inputs.by_{0}.shape[1]\n"
    "        bucket.by_{0}[:, n:] = stale[:, n:]\n"
)
REPLAY = "        bucket.graph.replay()\n"
REFRESH = "            for plan in plans.values():\n                plan.refresh(rows)\n"

HOLDS = "GraphSize.holds"

BUGS: dict[str, Seed] = {
    "padding keeps the slots of an earlier batch": _replaced(COPIES, UNPADDED.format("token")),
    "padding keeps the rows of an earlier batch": _replaced(COPIES, UNPADDED.format("row")),
    "inputs are copied behind the replay": _replaced(COPIES + REPLAY, REPLAY + COPIES),
    "nothing is replayed": _replaced(REPLAY, ""),
    "the tables' rows are not refreshed": _of_tiles(0),
    "positions are not refreshed": _of_tiles(1),
    "numbers of tokens are not refreshed": _of_tiles(2),
    "offsets are not refreshed": _of_tiles(3),
    "attention is refreshed before the capture alone": _replaced(REFRESH, ""),
    "a token does not attend to itself": _replaced(
        "DeviceRows.of(by_row)",
        "DeviceRows.of(by_row - (torch.arange(len(by_row)) == 1)[:, None].long())",
    ),
    "slots of a batch that is over are captured": _replaced(
        "dict(zip(self._pools, slots, strict=True))",
        "dict(zip(self._pools, [each.clone() for each in slots], strict=True))",
    ),
    "token ids of a batch that is over are captured": _replaced(
        "token_ids, positions, *slots = by_token.unbind(0)\n",
        "token_ids, positions, *slots = by_token.unbind(0)\n"
        "        token_ids = token_ids.clone()\n",
    ),
    "the next smaller graph is taken": replaced(
        sizes_module, "num_rows <= self.num_rows", "num_rows <= 2 * self.num_rows", HOLDS
    ),
    "a graph of fewer tokens is taken": replaced(
        sizes_module,
        "max_row_tokens <= self.max_row_tokens",
        "max_row_tokens <= 3 * self.max_row_tokens",
        HOLDS,
    ),
    "the smallest graph's result is given": _replaced(
        "return bucket.graph.out[:", "return [*self._buckets.values()][-1].graph.out[:"
    ),
    "the last tokens of the graph are given": _replaced(
        "bucket.graph.out[: inputs.by_token.shape[1]]",
        "bucket.graph.out[-inputs.by_token.shape[1] :]",
    ),
    "the host reads the longest position": _replaced(
        REFRESH, "            positions.max().item()\n" + REFRESH
    ),
    "positions come from the host": _replaced(
        REFRESH, "            positions.copy_(torch.from_numpy(positions.numpy() + 0))\n" + REFRESH
    ),
    "the tables of tiles are not kept": _replaced("by_row, plans, self", "by_row, {}, self"),
    "inputs are replaced, not written": _replaced(
        COPIES,
        "        bucket = _Bucket(\n"
        "            bucket.by_token.clone(), bucket.by_row, {}, bucket.graph\n"
        "        )\n" + COPIES,
    ),
}


@pytest.fixture(scope="module")
def expected(qwen: Path) -> list[Told]:
    return [*told(Talk(runner_of(qwen, "torch")), SOME_STEPS)]


@only_recorded
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str, qwen: Path, api: GraphApi, expected: list[Told]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # None of the bugs is in a layer, and torch's are interpreted in no time.
        patch.setattr(fused, "fused", lambda decoder: decoder)
        graphed = Talk(runner_of(qwen))
        BUGS[name](patch)

        def try_it() -> None:
            graphed.runner.capture_graphs(SOME_SIZES, api)
            assert_alike(graphed, expected, SOME_STEPS)

        with pytest.raises((AssertionError, NotCapturableError, RuntimeError, IndexError)):
            try_it()
    assert len(BUGS) >= 15
