"""FP8 weights with block scales are the weights they stand for, and incomplete ones are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from session_server.models.decoder import Decoder
from session_server.models.errors import CheckpointError, UnsupportedModel
from session_server.models.layers.block_weight import Fp8Weight
from session_server.models.layers.linear import Linear, PlainLinear
from session_server.models.registry import load_config
from session_server.runner import fp8, native
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import linear_factory
from session_server.runner.model_runner import ModelRunner
from session_server.runner.paged_decoder import ComputeBackend
from session_server.runner.survey import survey
from session_server.runner.weights import load_decoder
from tests.inspector.test_report import OPTIONS, assert_foretold
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.conversations import capacity
from tests.oracle.last_logits import last_logits
from tests.runner.rows import Rows

SIZES = {"hidden_size": 160, "intermediate_size": 300, "moe_intermediate_size": 130}
"""Blocks that end within a row, within a column, and none that is whole in one of them."""


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_twins("deepseek_v3", tmp_path_factory.mktemp("fp8"), **SIZES)


def write_twins(family: str, root: Path, **sizes: int) -> tuple[Path, Path]:
    """A checkpoint in FP8, and one of what its weights stand for."""
    twin = write_checkpoint(family, root / "floats", num_hidden_layers=2, **sizes)
    quantised = root / "fp8"
    quantised.mkdir()
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(twin / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if "_proj" in name and name.endswith(".weight"):
            stored[name], scales = quantise(tensor)
            stored[f"{name}_scale_inv"] = scales
            meant[name] = written_out(stored[name], scales)
    save_file(stored, quantised / "model.safetensors")
    save_file(meant, twin / "model.safetensors")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) >= 14
    config = json.loads((twin / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (quantised / "config.json").write_text(json.dumps(config))
    return quantised, twin


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scales, such that the largest of a block is the largest there is."""
    scales = torch.zeros(fp8.scales_shape(tuple(weight.shape)))
    numbers = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i, j in np.ndindex(*scales.shape):
        cells = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        scales[i, j] = weight[cells].abs().max() / 448
        numbers[cells] = (weight[cells] / scales[i, j]).to(torch.float8_e4m3fn)
    return numbers, scales


def written_out(numbers: Tensor, scales: Tensor) -> Tensor:
    rows, columns = (torch.arange(size) // 128 for size in numbers.shape)
    return numbers.float() * scales[rows][:, columns]


def load(directory: Path) -> Decoder:
    config = load_config(directory)
    return load_decoder(directory, config, device=torch.device("cpu"), dtype=torch.float32)


def logits(directory: Path) -> Tensor:
    decoder = load(directory)
    config = decoder.config
    runner = ModelRunner(decoder, config.cache_spec(16, "float32"), capacity(config, 16))
    rows = Rows(runner, 16)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 30).astype(np.int32)
    return runner.logits(rows.batch(rows.row(1, tokens)))


def test_an_fp8_checkpoint_is_the_model_its_weights_stand_for(twins: tuple[Path, Path]) -> None:
    quantised, twin = twins
    assert logits(quantised).equal(logits(twin))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_rows_of_heads_keep_their_scales(family: str, tmp_path: Path) -> None:
    """Of 48 outputs: rows that are reordered for rotation, in blocks of several projections."""
    sizes = {"hidden_size": 160, "intermediate_size": 300, "head_dim": 48}
    quantised, twin = write_twins(family, tmp_path, **sizes)
    assert logits(quantised).equal(logits(twin))


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("native", marks=pytest.mark.skipif(not native.is_available(), reason="none")),
        "triton",
    ],
)
def test_so_it_is_by_other_kernels(twins: tuple[Path, Path], backend: ComputeBackend) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton has no wheel for this machine")
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 5).astype(np.int32)
    ours = last_logits(twins[0], tokens, backend=backend)
    # Kernels for CPUs get numbers, which are the same.
    is_exact = backend == "native"
    meant = last_logits(twins[1], tokens, backend=backend if is_exact else "cpu")
    assert (ours - meant).abs().max() <= (0 if is_exact else 1e-4)
    assert_foretold(twins[0], replace(OPTIONS, backend=backend))


def test_weights_stay_in_8_bits_on_a_gpu_that_reads_them(
    twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this machine")
    from session_server.runner.triton import packing
    from session_server.runner.triton.linear import TritonLinear

    def load_weight() -> Linear:
        weight = torch.randn(40, 160)
        codes, scales = quantise(weight)
        return linear_factory("triton", "float32")(
            Fp8Weight(codes.view(torch.uint8), fp8.by_output(scales, 40)), None
        )

    assert isinstance(load_weight(), TritonLinear)
    options = replace(OPTIONS, backend="triton")
    whole, small = (survey(path, options).weight_bytes for path in reversed(twins))
    assert small < 0.7 * whole
    monkeypatch.setattr(packing, "has_e4m3", lambda _: False)
    assert isinstance(load_weight(), PlainLinear)
    assert survey(twins[0], options).weight_bytes == whole


def test_a_gpu_that_is_not_here_is_assumed_to_keep_them(
    twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryLimits(free_bytes=1 << 30)
    planned = replace(OPTIONS, device="cuda", dtype="bfloat16", memory=memory)

    def weight_bytes(backend: ComputeBackend) -> int:
        return survey(twins[0], replace(planned, backend=backend)).weight_bytes

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kept, dense = weight_bytes("triton"), weight_bytes("torch")
    assert kept < 0.8 * dense
    pytest.importorskip("triton", reason="triton has no wheel for this machine")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((8, 0), dense), ((9, 0), kept)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, as_=capability: as_)
        assert weight_bytes("triton") == expected


def test_the_largest_number_of_a_block_comes_back() -> None:
    weight = torch.randn(200, 300)
    numbers, scales = quantise(weight)
    assert scales.shape == (2, 3)
    back = fp8.dequantize(numbers, scales)
    assert back.equal(written_out(numbers, scales))
    torch.testing.assert_close(back, weight, rtol=0.07, atol=0.01)


def changed(twins: tuple[Path, Path], directory: Path, **changes: Tensor | None) -> Path:
    """A copy of the FP8 checkpoint with other tensors (`__` for a dot); None removes."""
    tensors = load_file(twins[0] / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_bytes((twins[0] / "config.json").read_bytes())
    return directory


SCALES = "model__layers__1__self_attn__o_proj__weight_scale_inv"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({SCALES: None}, r"missing tensors: \S+o_proj\.weight_scale_inv$"),
        ({SCALES: torch.ones(2, 2)}, r"wrong shapes: \S+o_proj\.weight_scale_inv is \[2, 2\] and"),
        (
            {SCALES: torch.ones(1, 2, dtype=torch.uint8)},
            r"o_proj\.weight_scale_inv is of dtype U8 and should be of BF16 or F16 or F32 or F8_E8",
        ),
        (
            {SCALES.removesuffix("_scale_inv"): torch.ones(160, 48)},
            r"unexpected tensors: \S+o_proj\.weight_scale_inv$",
        ),
        (
            {"model__layers__3__norm__weight": torch.ones(4)},
            r"unexpected tensors: model\.layers\.3",
        ),
    ],
)
def test_scales_that_are_missing_or_do_not_fit_are_named(
    changes: dict[str, Any], message: str, twins: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(changed(twins, tmp_path, **changes))


def test_layers_that_predict_further_tokens_are_left_out(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    further = {"model__layers__2__eh_proj__weight": torch.ones(160, 320)}
    directory = changed(twins, tmp_path, **further)
    assert len(load_config(directory).layers) == 2
    assert logits(directory).equal(logits(twins[0]))


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"quant_method": "awq"}, "quantized with 'awq'"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    quantisation: dict[str, Any], message: str, twins: tuple[Path, Path], tmp_path: Path
) -> None:
    raw = json.loads((twins[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": quantisation}))
    with pytest.raises(UnsupportedModel, match=message):
        load_config(tmp_path)


def test_every_expert_has_scales_of_its_own() -> None:
    assert fp8.scales_shape((256, 300)) == (2, 3)
    assert fp8.scales_shape((5, 256, 300)) == (5, 2, 3)
