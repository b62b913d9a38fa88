"""The largest forward is measured before KV is planned, on a fake of the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cache.spec import CacheSpec, Capacity
from session_server.core.batch import Batch, PendingStep, Runner, StepResult
from session_server.models.registry import load_config
from session_server.runner import activations, loader
from session_server.runner.activations import largest_batches, measure_activations
from session_server.runner.capacity import LargestForward, MemoryLimits, table_bytes
from session_server.runner.loader import RunnerOptions, load_runner
from session_server.runner.model_runner import ModelRunner
from session_server.runner.outputs import FinishedStep
from tests.gpu.fake_cuda import CUDA, fake_cuda
from tests.oracle.checkpoints import write_checkpoint

PEAK, HELD, FREE = 3 << 20, 1 << 20, 64 << 20
LARGEST = LargestForward(chunk_tokens=24, num_turns=3)
OPTIONS = RunnerOptions(
    page_size=4,
    num_rows=8,
    device="cuda:0",
    dtype="float32",
    backend="torch",
    max_context_len=64,
    memory=MemoryLimits(largest=LARGEST),
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (FREE, 2 * FREE))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: HELD)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: HELD + PEAK)
        yield


def shape(batch: Batch) -> tuple[int, int, int]:
    """Rows, tokens, and positions that are sampled."""
    rows = batch.rows
    return len(rows), sum(r.num_tokens for r in rows), sum(r.sample + r.num_drafts for r in rows)


@pytest.mark.parametrize(
    ("largest", "longest", "shapes"),
    [
        (LargestForward(512, 64), 4096, [(64, 575, 64)]),
        (LargestForward(8192, 1024), 1 << 20, [(1024, 9215, 1024)]),
        (LargestForward(512, 64, 4), 4096, [(64, 575, 64), (64, 320, 320)]),
        (LargestForward(100, 64, 4), 4096, [(64, 163, 64), (64, 164, 164)]),
        (LargestForward(512, 1), 128, [(1, 128, 1)]),
        (LargestForward(1, 1, 16), 1, [(1, 1, 1)]),
    ],
)
@pytest.mark.parametrize("has_history", [True, False])
def test_the_forward_has_all_that_a_scheduler_may_put_into_one(
    largest: LargestForward,
    longest: int,
    shapes: list[tuple[int, int, int]],
    *,
    has_history: bool,
) -> None:
    batches = largest_batches(largest, longest, has_history=has_history)
    assert [shape(batch) for batch in batches] == shapes
    for batch in batches:
        ends = [row.start + row.num_tokens for row in batch.rows]
        assert max(ends) == longest or (largest.num_turns == 1 and not has_history)
        assert len({row.row for row in batch.rows}) == len(batch.rows), "each has its counts"
        assert all(row.sampling is not None for row in batch.rows)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3", "qwen3_5_text"])
def test_what_is_measured_is_subtracted_and_its_kv_is_gone_before_the_real_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, device: None
) -> None:
    directory = write_checkpoint(family, tmp_path)
    made: list[tuple[Capacity, weakref.ref[torch.UntypedStorage]]] = []
    launched: list[Batch] = []

    class Seen(ModelRunner):
        def __init__(self, *args: object, **kwargs: object) -> None:
            assert all(kv() is None for _, kv in made)
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            (pool, *_) = self.pools.values()
            made.append((args[2], weakref.ref(pool)))  # type: ignore[arg-type]

        def launch(self, batch: Batch) -> PendingStep:
            launched.append(batch)
            return super().launch(batch)

    monkeypatch.setattr(loader, "ModelRunner", Seen)
    largest = replace(LARGEST, num_drafts=2)
    loaded = load_runner(directory, replace(OPTIONS, memory=MemoryLimits(largest=largest)))
    (small, _), (capacity, _) = made
    assert set(small.num_pages.values()) == {1}
    assert capacity == loaded.plan.capacity
    assert [shape(batch) for batch in launched] == [(3, 26, 3), (3, 9, 9)]
    plan = loaded.plan
    assert plan.activation_bytes == PEAK
    assert plan.table_bytes == table_bytes(loaded.spec, 8, 64)
    assert plan.table_bytes == sum(t.device_pages.nbytes for t in loaded.runner._tables.values())


def test_a_draft_model_is_measured_along(tmp_path: Path, *, device: None) -> None:
    directory = write_checkpoint("qwen3", tmp_path)
    memory = MemoryLimits(largest=replace(LARGEST, num_drafts=2, makes_drafts=True))
    loaded = load_runner(directory, replace(OPTIONS, memory=memory, draft=directory))
    assert loaded.plan.activation_bytes == PEAK


def spec_of(directory: Path) -> CacheSpec:
    return load_config(write_checkpoint("qwen3", directory)).cache_spec(4, "float32")


class Fails(Runner):
    """A runner all of whose forwards fail."""

    def __init__(self, error: str) -> None:
        self.error = error

    def launch(self, batch: Batch) -> PendingStep:
        return FinishedStep(StepResult(0, (), 0.0, error=self.error))


@pytest.mark.parametrize("is_made", [True, False])
def test_without_memory_it_says_what_to_lower(
    tmp_path: Path, *, is_made: bool, device: None
) -> None:
    told = "CUDA out of memory. Tried to allocate 5.00 GiB"

    def make(capacity: Capacity) -> Runner:
        if is_made:
            return Fails(f"OutOfMemoryError: {told}")
        raise torch.OutOfMemoryError(told)

    with pytest.raises(ValueError, match=r"24 tokens .* 3 turns .* lower --chunked-prefill-size"):
        measure_activations(LARGEST, make, spec_of(tmp_path), device=CUDA, max_context_len=64)


def test_what_fails_otherwise_is_not_taken_for_memory(tmp_path: Path, *, device: None) -> None:
    with pytest.raises(RuntimeError, match="does not run: RuntimeError: no kernel"):
        measure_activations(
            LARGEST,
            lambda _: Fails("RuntimeError: no kernel"),
            spec_of(tmp_path),
            device=CUDA,
            max_context_len=64,
        )


def test_a_history_is_no_longer_than_kv_could_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, device: None
) -> None:
    spec, lengths = spec_of(tmp_path), []

    def no_batches(_: LargestForward, longest: int, *, has_history: bool) -> Sequence[Batch]:
        lengths.append((longest, has_history))
        return ()

    monkeypatch.setattr(activations, "largest_batches", no_batches)
    for context_len in (64, 1 << 40):
        measure_activations(
            LARGEST, lambda _: Fails(""), spec, device=CUDA, max_context_len=context_len
        )
    assert lengths == [(64, True), (FREE // spec.bytes_per_page * 4, True)]


def test_graphs_leave_what_forwards_take(monkeypatch: pytest.MonkeyPatch, *, device: None) -> None:
    given: list[int] = []
    monkeypatch.setattr(loader, "CudaGraphs", lambda _, most: given.append(most))
    runner = SimpleNamespace(capture_graphs=lambda *_, **__: "none are captured", graphs=None)
    plan = SimpleNamespace(activation_bytes=PEAK)
    loaded = SimpleNamespace(device="cuda:0", runner=runner, plan=plan)
    loader.capture_graphs(loaded, 8, 0, on_progress=lambda *_: None)  # type: ignore[arg-type]
    assert given == [(FREE - PEAK) // 2]
