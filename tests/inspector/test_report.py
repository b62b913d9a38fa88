"""What `inspect` says of a checkpoint is what the server makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from session_server.config import CacheOptions, ModelOptions, Settings
from session_server.demo import MODEL_DIR
from session_server.engine_wiring import runner_options
from session_server.inspector.report import Report, make_report, session_figures
from session_server.local_server import LocalServer
from session_server.models.config import DTypeName
from session_server.models.registry import load_config
from session_server.runner import native
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import Quantization, RunnerOptions, layer_factories, load_runner
from session_server.runner.measured_weights import packed_bytes
from session_server.runner.paged_decoder import TORCH_DTYPES, BackendName, resolve_backend
from session_server.runner.survey import survey
from session_server.runner.weights import load_decoder
from tests.depth import at_depth
from tests.oracle.checkpoints import FAMILIES, LAYERED_FAMILIES, to_mxfp4, write_checkpoint
from tests.oracle.gguf_files import Choose, write_gguf
from tests.oracle.test_packed import FORMATS, leave_in_floats, triton_only, write_experts
from tests.text.tiny_models import write_model

ALL_FAMILIES = (*FAMILIES, *LAYERED_FAMILIES)
BOUNDED = MemoryLimits(max_total_tokens=1000)
OPTIONS = RunnerOptions(page_size=16, num_rows=4, device="cpu", memory=BOUNDED)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(family, root / family) for family in ALL_FAMILIES}


def report(directory: Path, options: RunnerOptions = OPTIONS, *lengths: int) -> Report:
    return make_report(str(directory), survey(directory, options), lengths)


def parts_of(part: Any, seen: set[int], kind: type[Any]) -> Iterator[Any]:
    """Every object of a kind, tensors say, that an object of ours refers to, once."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, kind):
        yield part
    elif isinstance(part, dict):
        for value in part.values():
            yield from parts_of(value, seen, kind)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from parts_of(value, seen, kind)
    elif is_dataclass(part) or type(part).__module__.startswith("session_server"):
        for of in type(part).__mro__:
            for name in getattr(of, "__slots__", ()):
                yield from parts_of(getattr(part, name, None), seen, kind)


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_pools_take_the_bytes_that_were_foretold(
    family: str, page_size: int, checkpoints: dict[str, Path]
) -> None:
    for limits in (BOUNDED, MemoryLimits(fraction=0.5, free_bytes=16 << 20)):
        options = replace(OPTIONS, page_size=page_size, memory=limits)
        foretold = report(checkpoints[family], options)
        loaded = load_runner(checkpoints[family], options)
        held: dict[str, Any] = {str(name): pool for name, pool in loaded.runner.pools.items()}
        if (states := loaded.runner.states) is not None:
            held[str(states.name)] = states
        assert {pool.name: pool.bytes for pool in foretold.pools} == {
            name: pool.num_bytes for name, pool in held.items()
        }
        assert {pool.name: pool.pages for pool in foretold.pools} == {
            name: pool.num_pages for name, pool in held.items()
        }
        assert foretold.memory.kv_bytes == sum(pool.num_bytes for pool in held.values())
        assert foretold.model.dtype == loaded.dtype
        for pool in foretold.pools:
            if pool.kind == "recurrent":
                assert pool.bytes_per_token == 0
                continue
            per_layer = held[pool.name].bytes_per_layer_token
            assert pool.bytes_per_token == pool.num_layers * per_layer


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("llama", "auto"),
        ("gemma2", "bfloat16"),
        ("deepseek_v3", "float32"),
        ("granitemoehybrid", "bfloat16"),
    ],
)
def test_a_served_session_holds_the_pages_that_were_foretold(
    family: str, kv_dtype: str, tmp_path: Path
) -> None:
    """Over `/v1/admin/memory`: a dense family, and those of windows, latents and states."""
    directory = write_checkpoint(family, tmp_path, vocab_size=512)
    write_model(directory, "chatml")
    settings = Settings(
        model=ModelOptions(context_length=512, kv_dtype=kv_dtype),
        cache=CacheOptions(page_size=4, max_total_tokens=1000, max_resident_sessions=4),
    )
    found = survey(directory, runner_options(settings))
    flags = ["--page-size", "4", "--max-total-tokens", "1000", "--context-length", "512"]
    flags += ["--max-resident-sessions", "4", "--threads", "1", "--log-level", "warning"]
    flags += ["--kv-cache-dtype", kv_dtype]
    ids = np.random.default_rng(0).integers(3, 500, 200).tolist()
    with (
        LocalServer(["--model-path", str(directory), *flags]) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as http,
    ):
        session = http.post("/v1/sessions", json={}).json()["id"]
        lengths = []
        for piece in (ids[:5], ids[5:24], ids[24:25], ids[25:150]):
            body = {"input_ids": piece, "sampling": {"max_tokens": 3, "ignore_eos": True}}
            turn = http.post(f"/v1/sessions/{session}/turns", json=body)
            assert turn.status_code == 200, turn.text
            memory = http.get("/v1/admin/memory").json()
            (held,) = memory["sessions"]
            lengths.append(held["committed_len"])
            foretold = session_figures(found, held["committed_len"])
            assert foretold.pages == {
                pool: held["protected_pages"][pool] + held["private_pages"][pool]
                for pool in memory["pools"]
            }
        assert lengths == sorted(lengths)
        assert lengths[-1] >= 150
        sizes = {pool.name: (pool.pages, pool.bytes) for pool in make_report("", found).pools}
        assert sizes == {
            name: (pool["pages"], pool["pages"] * pool["page_bytes"])
            for name, pool in memory["pools"].items()
        }
        assert server.stop() == 0


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_parameters_are_those_in_the_files(family: str, checkpoints: dict[str, Path]) -> None:
    (path,) = checkpoints[family].glob("*.safetensors")
    tensors = load_file(path)
    model = report(checkpoints[family]).model
    assert model.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert model.stored_bytes == path.stat().st_size


def test_quantised_experts_are_counted_as_numbers(tmp_path: Path) -> None:
    directory = write_checkpoint("gpt_oss", tmp_path, hidden_size=64, intermediate_size=96)
    plain = report(directory).model
    to_mxfp4(directory)
    quantised = report(directory).model
    assert quantised.parameters == plain.parameters
    assert quantised.weight_bytes == plain.weight_bytes
    assert quantised.stored_bytes < plain.stored_bytes


def test_a_token_meets_the_experts_it_is_sent_to(checkpoints: dict[str, Path]) -> None:
    model = report(checkpoints["qwen3_moe"]).model
    # Two of three layers send a token to 3 of 7 experts of three matrices of 48 by 24.
    assert model.parameters - model.active_parameters == 2 * (7 - 3) * 3 * 48 * 24
    dense = report(checkpoints["llama"]).model
    assert dense.parameters == dense.active_parameters


@pytest.mark.parametrize("directory", [MODEL_DIR, *ALL_FAMILIES], ids=str)
def test_weights_in_memory_are_as_large_as_foretold(
    directory: Path | str, checkpoints: dict[str, Path]
) -> None:
    path = directory if isinstance(directory, Path) else checkpoints[directory]
    assert_foretold(path, replace(OPTIONS, backend="cpu"))


def assert_foretold(path: Path, options: RunnerOptions) -> None:
    """Compare what a backend keeps, its matrices in layouts of its own among it."""
    model = report(path, options).model
    foretold = model.weight_bytes
    cpu = torch.device("cpu")
    stored = model.dtype if options.quantize == "none" else options.quantize
    factories = layer_factories(resolve_backend(options.backend, cpu), stored)
    dtype = TORCH_DTYPES[model.dtype]
    config = load_config(path)
    decoder = load_decoder(path, config, device=cpu, dtype=dtype, factories=factories)
    sizes: dict[int, int] = {}
    for tensor in parts_of(decoder, set(), torch.Tensor):
        is_packed = tensor.layout is torch._mkldnn
        place = id(tensor) if is_packed else tensor.untyped_storage().data_ptr()
        size = tensor.numel() * 4 if is_packed else tensor.untyped_storage().nbytes()
        sizes[place] = size
    held = sum(sizes.values())
    if options.backend == "native":
        from session_server.runner.native import _native

        held += sum(linear.num_bytes for linear in parts_of(decoder, set(), _native.Linear))
    # Beside the parameters there are gains spread over heads and rotary frequencies.
    # These are not codes whatever matrices are.
    plain = report(path, replace(options, quantize="none")).model.weight_bytes
    assert foretold <= held <= foretold + 0.03 * plain, (foretold, held)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_that_a_gpu_keeps_in_four_bits_are_as_large_as_foretold(
    dtype: DTypeName, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this machine")
    directory = write_checkpoint("gpt_oss", tmp_path, hidden_size=64, intermediate_size=96)
    options = replace(OPTIONS, backend="triton", dtype=dtype)
    dense = report(directory, options).model.weight_bytes
    to_mxfp4(directory)
    assert_foretold(directory, options)
    kept = report(directory, options).model.weight_bytes
    assert kept < 0.5 * dense if dtype == "bfloat16" else kept == dense


native_only = pytest.mark.skipif(not native.is_available(), reason="the kernels were not built")
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
BACKENDS = (
    "cpu",
    pytest.param("native", marks=native_only),
    *at_depth((), proof=(pytest.param("triton", marks=triton_only),)),
)


@native_only
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("directory", [MODEL_DIR, *ALL_FAMILIES], ids=str)
def test_matrices_of_the_kernels_are_as_large_as_foretold(
    directory: Path | str, quantize: Quantization, checkpoints: dict[str, Path]
) -> None:
    path = directory if isinstance(directory, Path) else checkpoints[directory]
    assert_foretold(path, replace(OPTIONS, backend="native", quantize=quantize))
    assert_foretold(path, replace(OPTIONS, backend="native", quantize=quantize, dtype="bfloat16"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_packed_checkpoints_are_as_large_as_foretold(
    name: str, backend: BackendName, tmp_path: Path
) -> None:
    twin = write_checkpoint("qwen2", tmp_path / "twin", **WIDE)
    path = FORMATS[name].write(twin, tmp_path / "packed")
    assert_foretold(path, replace(OPTIONS, backend=backend))


def of_one_kind(_: str) -> GGMLQuantizationType:
    return GGMLQuantizationType.Q4_0


def mixed(name: str) -> GGMLQuantizationType:
    """Parts of a fused matrix that are of several kinds, or codes beside numbers, become dense."""
    kinds = {"v_proj": "Q8_0", "up_proj": "Q5_1", "embed_tokens": "Q8_0", "w3": "Q5_1"}
    if ".experts." in name:  # they are stacked, all of one type
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType[next((k for part, k in kinds.items() if part in name), "Q4_1")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("choose", [of_one_kind, mixed])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "lfm2"])
def test_codes_of_gguf_files_are_as_large_as_foretold(
    family: str, choose: Choose, backend: BackendName, tmp_path: Path
) -> None:
    own = {"mlp_only_layers": [], "moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    own |= {"conv_bias": False} if family == "lfm2" else {}
    own |= {"attention_bias": False} if family == "gemma2" else {}
    twin = write_checkpoint(family, tmp_path / "twin", **{**WIDE, **own})
    path = write_gguf(twin, tmp_path / "m.gguf", choose)
    assert_foretold(path, replace(OPTIONS, backend=backend))


@triton_only
def test_codes_on_a_gpu_are_as_large_as_foretold(tmp_path: Path) -> None:
    twin = write_checkpoint("llama", tmp_path / "twin", **WIDE, num_hidden_layers=1)
    path = write_gguf(twin, tmp_path / "m.gguf", mixed)
    assert_foretold(path, replace(OPTIONS, backend="triton"))


@pytest.mark.parametrize(
    "backend",
    ["cpu", pytest.param("native", marks=native_only), pytest.param("triton", marks=triton_only)],
)
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("name", ["gptq", "int_8_by_token"])
def test_experts_of_codes_are_as_large_as_foretold(
    name: str, backend: BackendName, tmp_path: Path, *, is_mixed: bool
) -> None:
    twin = write_experts(tmp_path / "twin", num_hidden_layers=1, num_experts=32)
    path = FORMATS[name].write(twin, tmp_path / "packed")
    if is_mixed:
        leave_in_floats(path, twin, "experts.2.gate_proj")
    options = replace(OPTIONS, backend=backend)
    assert_foretold(path, options)
    model = report(path, options).model
    is_kept = backend != "cpu" and not is_mixed
    assert (model.weight_bytes < 2 * model.parameters) is is_kept


@native_only
def test_memory_that_codes_leave_free_is_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = write_checkpoint("llama", tmp_path / "twin", **WIDE)
    path = write_gguf(twin, tmp_path / "m.gguf", of_one_kind)
    options = replace(OPTIONS, backend="native", memory=MemoryLimits())
    codes = report(path).model.weight_bytes
    dense = report(path, replace(OPTIONS, backend="cpu")).model.weight_bytes
    assert codes < dense / 3
    monkeypatch.setattr("session_server.runner.survey.free_bytes", lambda _: dense)
    assert survey(path, options).plan.free_bytes == dense - codes


@native_only
def test_the_bits_of_a_matrix_are_those_of_its_format() -> None:
    bits = {
        name: 8 * packed_bytes(4096, 14336, name) / (4096 * 14336)
        for name in ("float32", "bfloat16", "int8", "int4")
    }
    assert bits == {"float32": 32, "bfloat16": 16, "int8": 8.5, "int4": 5}


def test_layers_that_are_alike_stand_together(checkpoints: dict[str, Path]) -> None:
    windowed, full = report(checkpoints["gemma3_text"]).layers
    assert (windowed.layers, windowed.kind, windowed.window) == ((0, 1, 2, 3, 4), "window", 16)
    assert (full.layers, full.kind, full.window) == ((5,), "full", 0)
    dense, routed = report(checkpoints["deepseek_v3"]).layers
    assert (dense.layers, dense.num_experts, dense.ffn_size) == ((0,), 0, 80)
    assert (routed.layers, routed.num_experts, routed.num_chosen_experts) == ((1, 2), 8, 3)
    assert (routed.ffn_size, routed.shared_size, routed.head_dim) == (24, 48, 28)


def test_as_many_sessions_fit_as_the_pools_have_pages_for(checkpoints: dict[str, Path]) -> None:
    options = replace(OPTIONS, num_rows=1024)
    found = report(checkpoints["llama"], options, 1, 16, 17, 300, 1000, 1024, 1025)
    assert [session.fit for session in found.sessions] == [63, 63, 31, 3, 1, 0, 0]
    assert [session.is_too_long for session in found.sessions] == [False] * 6 + [True]
    few_rows = report(checkpoints["llama"], replace(options, num_rows=2), 1)
    assert [session.fit for session in few_rows.sessions] == [2]


def test_a_window_does_not_grow_with_its_session(checkpoints: dict[str, Path]) -> None:
    found = report(checkpoints["gemma2"], OPTIONS, 160, 1024)
    shorter, longer = found.sessions
    assert shorter.bytes["window"] == longer.bytes["window"]
    assert longer.bytes["full"] == 64 * 16 * found.pools[0].bytes_per_token
    assert 16 <= shorter.pages["window"] * 16 <= 16 + 2 * 16


def test_lengths_go_up_to_the_context() -> None:
    shown = [session.length for session in report(MODEL_DIR).sessions]
    assert shown == [1024, 4096]


def test_what_is_free_is_measured_without_the_weights() -> None:
    free = MemoryLimits(free_bytes=1 << 30)
    given = report(MODEL_DIR, replace(OPTIONS, memory=free)).memory
    assert given.free_bytes == 1 << 30
    measured = survey(MODEL_DIR, replace(OPTIONS, memory=MemoryLimits()))
    assert 0 < measured.plan.free_bytes < 1 << 50
    assert math.isclose(measured.weight_bytes, 4.33e6, rel_tol=0.01)


def test_no_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint("qwen3", tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("session_server.runner.checkpoint.TensorReader._read", refuse)
    assert report(directory).model.parameters > 0
    path = directory / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)
    assert report(directory).model.stored_bytes < report(directory).model.weight_bytes
