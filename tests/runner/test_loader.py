"""From a directory to a runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.demo import MODEL_DIR
from session_server.models.config import FULL_POOL, KvDTypeName
from session_server.models.errors import CheckpointError, DraftMismatch
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import (
    RunnerOptions,
    check_kv_dtype,
    choose_device,
    choose_dtype,
    load_runner,
)
from session_server.runner.survey import survey
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.gguf_files import write_gguf
from tests.runner.rows import Rows


def test_the_embedded_model_loads_through_the_path_of_any_checkpoint() -> None:
    loaded = load_runner(MODEL_DIR, RunnerOptions(page_size=16, num_rows=2, device="cpu"))
    assert loaded.dtype == "float16"
    assert loaded.plan.capacity.max_context_len == loaded.config.max_position_embeddings
    num_pages = {name: pool.num_pages for name, pool in loaded.runner.pools.items()}
    assert num_pages == loaded.plan.capacity.num_pages


def test_the_context_can_be_shortened_but_not_stretched() -> None:
    for asked, expected in ((100, 100), (1 << 20, 4096)):
        options = RunnerOptions(page_size=16, num_rows=1, device="cpu", max_context_len=asked)
        assert load_runner(MODEL_DIR, options).plan.capacity.max_context_len == expected


def test_a_draft_model_takes_its_share_of_the_memory(tmp_path: Path) -> None:
    draft = write_random_checkpoint(tmp_path, RandomModel(num_hidden_layers=1))
    limits = MemoryLimits(max_total_tokens=160)
    options = RunnerOptions(page_size=16, num_rows=2, device="cpu", memory=limits)
    alone = load_runner(MODEL_DIR, options)
    both = load_runner(MODEL_DIR, replace(options, draft=draft))
    assert both.spec == alone.spec
    assert both.plan.capacity == alone.plan.capacity
    draft_bytes = 11 * 16 * 2 * 1 * 2 * 32 * 2  # pages, tokens, K and V, layers, heads, dim, fp16
    assert both.plan.kv_bytes == alone.plan.kv_bytes + draft_bytes
    tight = MemoryLimits(fraction=12 * both.spec.bytes_per_page / both.plan.free_bytes)
    squeezed = [
        load_runner(MODEL_DIR, replace(options, memory=tight, draft=path)).plan.capacity
        for path in (None, draft)
    ]
    pages = [max(capacity.num_pages.values()) for capacity in squeezed]
    assert 2 <= pages[1] < pages[0]


def test_a_gguf_file_can_draft_for_a_directory(tmp_path: Path) -> None:
    directory = write_random_checkpoint(tmp_path / "draft", RandomModel(num_hidden_layers=1))
    draft = write_gguf(directory, tmp_path / "draft.gguf")
    limits = MemoryLimits(max_total_tokens=160)
    options = RunnerOptions(page_size=16, num_rows=2, device="cpu", memory=limits)
    loaded = [load_runner(MODEL_DIR, replace(options, draft=path)) for path in (directory, draft)]
    assert loaded[0].plan.kv_bytes == loaded[1].plan.kv_bytes


def test_kv_is_stored_in_what_was_asked_for_that_of_a_draft_model_too(tmp_path: Path) -> None:
    draft = write_random_checkpoint(tmp_path, RandomModel(num_hidden_layers=1))
    options = RunnerOptions(
        page_size=16,
        num_rows=2,
        device="cpu",
        dtype="float32",
        memory=MemoryLimits(max_total_tokens=160),
        draft=draft,
    )
    whole = load_runner(MODEL_DIR, options)
    halves = load_runner(MODEL_DIR, replace(options, kv_dtype="bfloat16"))
    assert (whole.dtype, whole.kv_dtype) == ("float32", "float32")
    assert (halves.dtype, halves.kv_dtype) == ("float32", "bfloat16")
    assert halves.plan.kv_bytes * 2 == whole.plan.kv_bytes
    drafting = halves.runner._draft
    assert drafting is not None
    pools = [*halves.runner.pools.values(), *drafting.model.pools.values()]
    assert [(pool.dtype, pool.read_dtype) for pool in pools] == [
        (torch.bfloat16, torch.float32)
    ] * 2
    assert halves.plan.kv_bytes == sum(pool.num_bytes for pool in pools)
    asked = replace(options, dtype="bfloat16", kv_dtype="float32", draft=None)
    pool = load_runner(MODEL_DIR, asked).runner.pools[FULL_POOL]
    assert (pool.dtype, pool.read_dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_8_bit_floats_are_for_kernels_that_read_them(
    kv_dtype: KvDTypeName, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunnerOptions(page_size=16, num_rows=2, device="cpu", kv_dtype=kv_dtype)
    for backend in ("native", "cpu", "torch"):
        words = f"--kv-cache-dtype {kv_dtype} needs .*--attention-backend triton, .* is {backend}"
        with pytest.raises(ValueError, match=words):
            check_kv_dtype(kv_dtype, torch.device("cpu"), backend)
    with pytest.raises(ValueError, match="or for bfloat16"):
        load_runner(MODEL_DIR, options)
    check_kv_dtype(kv_dtype, torch.device("cpu"), "triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    if kv_dtype == "fp8_e4m3":
        with pytest.raises(ValueError, match="take fp8_e5m2"):
            check_kv_dtype(kv_dtype, torch.device("cuda"), "triton")
    else:
        check_kv_dtype(kv_dtype, torch.device("cuda"), "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_kv_dtype(kv_dtype, torch.device("cuda"), "triton")


def test_kv_in_8_bits_takes_a_quarter_of_the_memory() -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this machine")
    limits = MemoryLimits(max_total_tokens=160)
    options = RunnerOptions(page_size=16, num_rows=2, device="cpu", dtype="float32", memory=limits)
    whole, small = (
        survey(MODEL_DIR, replace(options, backend="triton", kv_dtype=kv_dtype))
        for kv_dtype in ("auto", "fp8_e4m3")
    )
    assert small.spec.kv_dtype == "fp8_e4m3"
    assert 4 * small.plan.kv_bytes == whole.plan.kv_bytes


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    draft = write_checkpoint("qwen3", tmp_path)
    options = RunnerOptions(page_size=16, num_rows=1, device="cpu", draft=draft)
    with pytest.raises(DraftMismatch, match="131 tokens and not 1536") as error:
        load_runner(MODEL_DIR, options)
    assert str(draft) in str(error.value)
    assert str(MODEL_DIR) in str(error.value)


def test_a_draft_model_must_reach_as_far_as_the_context(tmp_path: Path) -> None:
    draft = write_random_checkpoint(tmp_path, RandomModel(max_position_embeddings=1024))
    options = RunnerOptions(page_size=16, num_rows=1, device="cpu", draft=draft)
    with pytest.raises(DraftMismatch, match="its own context has 1024"):
        load_runner(MODEL_DIR, options)
    assert load_runner(MODEL_DIR, replace(options, max_context_len=1024))


@pytest.mark.parametrize(
    ("family", "window", "named"),
    [
        ("llama", None, "it has window attention layers, which the other lacks"),
        ("gemma2", 15, "its window is 16 positions, more than 15"),
    ],
)
def test_a_draft_model_keeps_no_more_than_the_model(
    family: str, window: int | None, named: str, tmp_path: Path
) -> None:
    more = {} if window is None else {"sliding_window": window}
    model = write_checkpoint(family, tmp_path / "model", **more)
    draft = write_checkpoint("mistral_window", tmp_path / "draft")
    options = RunnerOptions(page_size=16, num_rows=1, device="cpu", draft=draft)
    with pytest.raises(DraftMismatch, match=named):
        load_runner(model, options)


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


@pytest.mark.parametrize(("device", "said"), [("auto", "sees no CUDA"), ("cpu", "runs on GPUs")])
def test_who_did_not_ask_for_a_cpu_is_told_what_a_gpu_needs(
    device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this machine")
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = RunnerOptions(page_size=16, num_rows=1, device=device, backend="triton")
    with pytest.raises(ValueError, match=f"--attention-backend triton: .*{said}"):
        load_runner(MODEL_DIR, options)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        assert choose_device("cuda").type == "cuda"
    else:
        with pytest.raises(ValueError, match="sees no CUDA device"):
            choose_device("cuda:0")


@pytest.mark.parametrize(
    ("device", "backend", "of_checkpoint", "chosen"),
    [
        ("cpu", "native", "float32", "float32"),
        ("cpu", "native", "bfloat16", "bfloat16"),
        ("cpu", "native", "float16", "float16"),
        ("cpu", "cpu", "bfloat16", "float32"),
        ("cpu", "torch", "float16", "float32"),
        ("cuda", "torch", "float32", "bfloat16"),
        ("cuda", "torch", "float16", "float16"),
    ],
)
def test_auto_dtype_is_the_checkpoints_where_that_is_fast(
    device: str, backend: str, of_checkpoint: str, chosen: str
) -> None:
    assert choose_dtype("auto", of_checkpoint, torch.device(device), backend) == chosen
    assert choose_dtype("float32", of_checkpoint, torch.device(device), backend) == "float32"


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
