"""What the composition root of the engine's side makes of settings that ask for drafts."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cache.spec import Capacity
from cache.types import NULL_ROW, PoolName
from session_server import engine_wiring
from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.config import CacheOptions, EngineOptions, ModelOptions, Settings
from session_server.core.batch import Batch, Runner, StepResult
from session_server.demo import MODEL_DIR
from session_server.engine.config import Drafter, Speculation
from session_server.engine_host.loop import EngineAssembly
from session_server.engine_wiring import build_engine, chunk_for, runner_options, warm_up
from session_server.models.errors import DraftMismatch
from session_server.runner.capacity import CapacityPlan, LargestForward
from session_server.runner.loader import LoadedRunner

DRAFT_SHAPE = RandomModel(num_hidden_layers=1, max_position_embeddings=4096)


def build(draft_path: Path | None, speculation: str = "model") -> EngineAssembly:
    settings = Settings(
        model=ModelOptions(
            device="cpu", draft_path=None if draft_path is None else str(draft_path)
        ),
        engine=EngineOptions(speculation=speculation, num_draft_tokens=3),
        cache=CacheOptions(max_total_tokens=1024, max_resident_sessions=4),
    )
    return build_engine(settings)


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_random_checkpoint(tmp_path, DRAFT_SHAPE)


def test_a_pool_that_is_smaller_than_the_context_is_told_at_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = build(None, speculation="off").ready.max_turn_len
    assert f"serving {served} tokens instead of 4096" in caplog.text
    caplog.clear()
    build_engine(Settings(model=ModelOptions(device="cpu", context_length=128)))
    assert "KV memory is smaller" not in caplog.text


@pytest.mark.parametrize(
    ("speculation", "drafted"),
    [
        (Speculation(), []),
        (Speculation(3), [(1, 4, 3, True), (2, 4, 3, True), (4, 4, 3, True), (8, 4, 3, True)]),
        (
            Speculation(3, Drafter.MODEL),
            [(1, 4, 3, False), (2, 4, 3, False), (4, 4, 3, False), (8, 4, 3, False)],
        ),
    ],
)
def test_every_shape_runs_once_before_a_client_needs_it(
    speculation: Speculation, drafted: list[tuple[int, int, int, bool]]
) -> None:
    shapes = []

    def launch(batch: Batch) -> SimpleNamespace:
        row = batch.rows[0]
        assert all(each.row == NULL_ROW for each in batch.rows), "padding"
        shapes.append((len(batch.rows), row.num_tokens, row.num_drafts, row.drafts is not None))
        return SimpleNamespace(wait=lambda: StepResult(0, (), forward_s=0.0))

    warm_up(cast("Runner", SimpleNamespace(launch=launch)), speculation)
    plain = [(1, 1, 0, False), (1, 8, 0, False), (2, 1, 0, False), (4, 1, 0, False)]
    assert shapes == [*plain, (8, 1, 0, False), *drafted]


@pytest.mark.parametrize(
    ("token_s", "chunk"), [(1e-6, 512), (1.9e-4, 512), (2e-4, 256), (1e-3, 64), (1.0, 64)]
)
def test_a_chunk_takes_a_tenth_of_a_second_where_the_device_lets_it(
    token_s: float, chunk: int
) -> None:
    slow = iter([3.0, 1.0])  # the first forward also finds memory

    def launch(batch: Batch) -> SimpleNamespace:
        (row,) = batch.rows
        assert row.row == NULL_ROW
        duration_s = row.num_tokens * token_s * next(slow)
        return SimpleNamespace(wait=lambda: StepResult(0, (), forward_s=duration_s))

    runner = cast("Runner", SimpleNamespace(launch=launch))
    assert chunk_for(runner, 4096, is_linear=True) == chunk
    slow = iter([1.0, 1.0])
    assert chunk_for(runner, 32, is_linear=True) == chunk


@pytest.mark.parametrize(
    ("launches_s", "token_s", "chunk"),
    [(0.09, 1e-6, 512), (0.01, 3e-4, 256), (0.09, 1e-3, 64), (1.0, 0.0, 64)],
)
def test_on_a_gpu_what_a_forward_takes_for_its_launches_makes_no_chunk_smaller(
    launches_s: float, token_s: float, chunk: int
) -> None:
    def launch(batch: Batch) -> SimpleNamespace:
        duration_s = launches_s + batch.rows[0].num_tokens * token_s
        return SimpleNamespace(wait=lambda: StepResult(0, (), forward_s=duration_s))

    runner = cast("Runner", SimpleNamespace(launch=launch))
    assert chunk_for(runner, 4096, is_linear=False) == chunk
    assert chunk_for(runner, 100, is_linear=False) == 64


def test_the_memory_of_a_pool_is_logged_in_mib(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    build(None, speculation="off")
    (pool,) = (message for message in caplog.messages if message.startswith("kv pool=full "))
    # 65 pages of 16 tokens, 4 layers, 2 heads of 32, keys and values in 16 bits: 1,040 KiB.
    assert pool == "kv pool=full pages=65 tokens=1024 mib=1.0"


@pytest.mark.parametrize(
    ("engine", "largest"),
    [
        (EngineOptions(), LargestForward(512, 64)),
        (EngineOptions(chunked_prefill_size=8192), LargestForward(8192, 64)),
        (
            EngineOptions(max_running_turns=320, speculation="ngram"),
            LargestForward(512, 320, 4),
        ),
        (
            EngineOptions(speculation="model", num_draft_tokens=2),
            LargestForward(512, 64, 2, makes_drafts=True),
        ),
    ],
)
def test_memory_is_planned_for_the_largest_forward_of_the_settings(
    engine: EngineOptions, largest: LargestForward
) -> None:
    assert runner_options(Settings(engine=engine)).memory.largest == largest


def test_what_takes_a_device_s_memory_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    capacity = Capacity({}, 1, 16)
    plan = CapacityPlan(capacity, {PoolName("full"): 4 << 20}, 0, "", 2 << 20, 3 << 20)
    loaded = SimpleNamespace(device="cuda:0", plan=plan, spec=None)
    engine_wiring._log_pools(cast("LoadedRunner", loaded))
    assert caplog.messages == ["memory activations_mib=2 page_tables_mib=3 kv_mib=4"]


def test_progress_is_logged_every_two_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    times_s = iter([100.0, 101.9, 102.0, 102.0, 103.9, 104.0, 104.0])
    monkeypatch.setattr(engine_wiring, "time", SimpleNamespace(monotonic=lambda: next(times_s)))
    report = engine_wiring._progress_logger("loading weights %d of %d tensors")
    for num_read in range(1, 5):
        report(num_read, 9)
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights 2 of 9 tensors",
        "loading weights 4 of 9 tensors",
    ]


def test_a_draft_model_is_loaded_beside_the_embedded_one(draft: Path) -> None:
    assert build(draft).ready.vocab_size == 1536


def test_without_its_algorithm_a_draft_model_is_not_even_looked_for(tmp_path: Path) -> None:
    assert build(tmp_path / "nowhere", speculation="ngram").ready.vocab_size == 1536


def test_drafting_by_a_model_needs_one() -> None:
    with pytest.raises(ValueError, match="--speculative-draft-model-path"):
        build(None)


def test_a_draft_model_with_another_tokenizer_is_refused_and_both_are_named(draft: Path) -> None:
    path = draft / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocabulary = raw["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(raw))
    with pytest.raises(DraftMismatch, match="other tokens or other ids") as error:
        build(draft)
    assert str(draft) in str(error.value)
    assert str(MODEL_DIR) in str(error.value)


def test_a_draft_model_without_a_tokenizer_is_refused(draft: Path) -> None:
    (draft / "tokenizer.json").unlink()
    with pytest.raises(DraftMismatch, match=r"has no tokenizer\.json"):
        build(draft)


def test_a_draft_model_that_is_the_model_itself_is_fine(tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(MODEL_DIR, twin)
    assert build(twin).ready.num_pages == 1024 // 16 + 1
