"""Quantized checkpoints compute what `transformers` computes with the weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from session_server.models.errors import CheckpointError, ModelError, UnsupportedModel
from session_server.models.layers.block_weight import BlockWeight
from session_server.models.quantization import parse_quantization
from session_server.models.registry import load_config
from session_server.runner.packed_formats import packed_format
from session_server.runner.weights import load_decoder, open_checkpoint
from tests.depth import at_depth
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import reference_logits, write_checkpoint
from tests.oracle.last_logits import assert_near, assert_near_by_kernels, last_logits
from tests.oracle.packed_files import (
    Codes,
    Tensors,
    awq,
    gptq,
    naive,
    packed,
    quantize_checkpoint,
    random_codes,
)

TOLERANCE = 1e-4
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 60).astype(np.int32)
CPU = torch.device("cpu")
triton_only = pytest.mark.skipif(find_spec("triton") is None, reason="triton has no wheel here")


@dataclass(frozen=True)
class Format:
    """A way to store matrices. `is_exact`: as codes that `BlockWeight` describes."""

    quantization: dict[str, Any]
    pack: Callable[[str, Codes], Tensors]
    num_bits: int = 4
    group_size: int | None = 64
    zero: int | None = None
    order: bool = False
    is_exact: bool = True

    def write(self, twin: Path, directory: Path) -> Path:
        options = {
            name: getattr(self, name) for name in ("num_bits", "group_size", "zero", "order")
        }
        return quantize_checkpoint(twin, directory, self.quantization, self.pack, **options)


def compressed(
    form: str, num_bits: int, size: int | None, inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Weights of so many bits, by group or by channel. `inputs`: how activations are rounded."""
    strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, **strategy, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def gptq_config(num_bits: int, size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": num_bits, "group_size": size, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
BY_TOKEN = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "group_size": None,
    "strategy": "token",
    "dynamic": True,
    "actorder": None,
    "observer": None,
    "observer_kwargs": {},
}
"""Activations of llm-compressor's W8A8."""

FORMATS = {
    "awq": Format(AWQ, partial(awq, num_bits=4)),
    "gptq": Format(gptq_config(4, 64), partial(gptq, num_bits=4)),
    "gptq_v2": Format(
        gptq_config(4, 32, checkpoint_format="gptq_v2"),
        partial(gptq, num_bits=4, offset=0, index=False),
        group_size=32,
    ),
    "gptq_by_row": Format(gptq_config(4, -1), partial(gptq, num_bits=4), group_size=None),
    "gptq_small_groups": Format(
        gptq_config(4, 16), partial(gptq, num_bits=4), group_size=16, is_exact=False
    ),
    "gptq_by_activations": Format(
        gptq_config(4, 64, desc_act=True), partial(gptq, num_bits=4), order=True, is_exact=False
    ),
    "gptq_8": Format(gptq_config(8, 64), partial(gptq, num_bits=8), num_bits=8, zero=128),
    "gptq_8_asymmetric": Format(
        gptq_config(8, 64), partial(gptq, num_bits=8), num_bits=8, is_exact=False
    ),
    "packed_4": Format(
        compressed("pack-quantized", 4, 64), partial(packed, num_bits=4, symmetric=True), zero=8
    ),
    "packed_4_asymmetric": Format(
        compressed("pack-quantized", 4, 64, symmetric=False),
        partial(packed, num_bits=4, symmetric=False),
    ),
    "packed_4_by_activations": Format(
        compressed("pack-quantized", 4, 64, actorder="group"),
        partial(packed, num_bits=4, symmetric=True, order=True),
        zero=8,
        order=True,
        is_exact=False,
    ),
    "packed_8": Format(
        compressed("pack-quantized", 8, None),
        partial(packed, num_bits=8, symmetric=True),
        num_bits=8,
        group_size=None,
        zero=128,
    ),
    "naive_8": Format(
        compressed("naive-quantized", 8, None),
        partial(naive, num_bits=8, symmetric=True),
        num_bits=8,
        group_size=None,
        zero=128,
    ),
    "int_8_groups": Format(
        compressed("int-quantized", 8, 32),
        partial(naive, num_bits=8, symmetric=True),
        num_bits=8,
        group_size=32,
        zero=128,
    ),
    "int_8_by_token": Format(
        compressed("int-quantized", 8, None, inputs=BY_TOKEN),
        partial(naive, num_bits=8, symmetric=True),
        num_bits=8,
        group_size=None,
        zero=128,
    ),
    "naive_8_asymmetric": Format(
        compressed("naive-quantized", 8, None, symmetric=False),
        partial(naive, num_bits=8, symmetric=False),
        num_bits=8,
        group_size=None,
        is_exact=False,
    ),
}


def assert_exact(path: Path, twin: Path) -> None:
    expected = reference_logits(twin, TOKENS)[-1]
    assert expected.std() > 0.1, "logits that say nothing"
    assert (last_logits(path, TOKENS) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_the_model_that_its_integers_stand_for(name: str, tmp_path: Path) -> None:
    twin = write_checkpoint("qwen2", tmp_path / "twin", **SIZES)
    path = FORMATS[name].write(twin, tmp_path / "packed")
    assert_exact(path, twin)
    assert_near_by_kernels(path, twin, TOKENS)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "olmo3", "mistral"])
def test_every_family_may_be_quantized(family: str, tmp_path: Path) -> None:
    twin = write_checkpoint(family, tmp_path / "twin", **SIZES)
    path = FORMATS["awq"].write(twin, tmp_path / "packed")
    assert_exact(path, twin)
    assert_near_by_kernels(path, twin, TOKENS)


def write_experts(directory: Path, **more: Any) -> Path:
    """A model whose experts have tensors of their own."""
    fields = {**SIZES, "moe_intermediate_size": 64, **more}
    twin = write_checkpoint("qwen3_moe", directory, **fields)
    path = twin / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        prefix, _, kind = name.rpartition(".")
        for index, matrix in enumerate(tensor if prefix.endswith("experts") else ()):
            sides = ("down",) if kind == "down_proj" else ("gate", "up")
            for side, part in zip(sides, matrix.chunk(len(sides)), strict=True):
                tensors[f"{prefix}.{index}.{side}_proj.weight"] = part.contiguous()
        if not prefix.endswith("experts"):
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    return twin


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq_8"])
def test_experts_may_be_quantized_one_by_one(name: str, tmp_path: Path) -> None:
    twin = write_experts(tmp_path / "twin")
    path = FORMATS[name].write(twin, tmp_path / "packed")
    assert_exact(path, twin)
    assert_near_by_kernels(path, twin, TOKENS)


def assert_near_on_a_gpu(path: Path, twin: Path) -> None:
    """Compare what the kernels for GPUs compute of experts, which the interpreter does slowly."""
    tokens = TOKENS[: at_depth(4, proof=30)]
    ours, expected = last_logits(path, tokens, backend="triton"), reference_logits(twin, tokens)[-1]
    # Minimums, which are products, are rounded to 16 bits.
    assert ours.sub(expected).abs().max() <= 0.01 * expected.std()


@triton_only
@pytest.mark.parametrize(
    "name", at_depth(["gptq"], proof=["awq", "gptq", "gptq_8", "gptq_by_activations", "packed_4"])
)
def test_experts_that_stay_codes_on_a_gpu_are_what_they_stand_for(
    name: str, tmp_path: Path
) -> None:
    twin = write_experts(tmp_path / "twin", num_hidden_layers=at_depth(1, proof=3))
    assert_near_on_a_gpu(FORMATS[name].write(twin, tmp_path / "packed"), twin)


def leave_in_floats(packed: Path, twin: Path, matrix: str) -> None:
    """Store a matrix of every layer that has it as the numbers that it stands for."""
    path = packed / "model.safetensors"
    stored = {k: v for k, v in load_file(path).items() if f".{matrix}." not in k}
    meant = load_file(twin / "model.safetensors").items()
    numbers = {name: numbers for name, numbers in meant if name.endswith(f".{matrix}.weight")}
    assert numbers
    save_file(stored | numbers, path)


def disorder_groups(packed: Path, matrix: str) -> None:
    """Give a matrix of every layer that has it groups that change within blocks."""
    path = packed / "model.safetensors"
    tensors = load_file(path)
    indices = [name for name in tensors if name.endswith(f".{matrix}.g_idx")]
    assert indices
    save_file(tensors | {name: tensors[name].roll(16) for name in indices}, path)


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("matrix", ["gate_proj", "down_proj"])
def test_one_expert_may_be_left_in_floats(index: int, matrix: str, tmp_path: Path) -> None:
    twin = write_experts(tmp_path / "twin")
    path = FORMATS["gptq"].write(twin, tmp_path / "packed")
    leave_in_floats(path, twin, f"experts.{index}.{matrix}")
    assert_exact(path, twin)
    assert_near_by_kernels(path, twin, TOKENS)


@triton_only
@pytest.mark.parametrize("index", at_depth([2], proof=[0, 2]))
def test_one_expert_may_be_left_in_floats_on_a_gpu(index: int, tmp_path: Path) -> None:
    twin = write_experts(tmp_path / "twin", num_hidden_layers=1)
    path = FORMATS["gptq"].write(twin, tmp_path / "packed")
    leave_in_floats(path, twin, f"experts.{index}.down_proj")
    assert_near_on_a_gpu(path, twin)


def test_the_inputs_of_one_expert_may_have_an_order_of_their_own(tmp_path: Path) -> None:
    path = FORMATS["gptq"].write(write_experts(tmp_path / "twin"), tmp_path / "packed")
    disorder_groups(path, "experts.1.up_proj")
    by_torch = last_logits(path, TOKENS)
    assert_near(last_logits(path, TOKENS, backend="native"), by_torch)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_come_as_codes_where_blocks_can_hold_them(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    twin = write_checkpoint("qwen2", tmp_path / "twin", **SIZES)
    directory = form.write(twin, tmp_path / "packed")
    config = load_config(directory)
    checkpoint = open_checkpoint(directory, config)
    weight_name, shape = "model.layers.0.mlp.gate_proj.weight", (192, 128)
    meant = load_file(twin / "model.safetensors")[weight_name]
    with checkpoint.reader(device=CPU, dtype=torch.float32) as reader:
        weight = reader.take_linear(weight_name, *shape)
        assert isinstance(weight, BlockWeight) is form.is_exact
        dense = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        assert dense.equal(meant)
        assert reader.take(weight_name, *shape).equal(meant)


def test_a_zero_point_of_zero_borrows_from_the_next_in_a_first_gptq_file() -> None:
    codes = random_codes((8, 32), 0, num_bits=4)
    assert codes.zeros[0, 0] == 0
    word = int(gptq("x", codes, 4)["x.qzeros"][0, 0])
    assert word & 15 == 15
    assert word >> 4 & 15 == (codes.zeros[1, 0] - 2) % 16


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    twin = write_checkpoint("qwen2", tmp_path / "twin", **SIZES)
    return FORMATS["gptq"].write(twin, tmp_path / "packed")


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("qzeros", None, "missing tensors: .*q_proj.qzeros"),
        ("qweight", lambda t: t[:-1], "wrong shapes: .*q_proj.qweight"),
        ("scales", lambda t: t[:1], "wrong shapes: .*q_proj.scales"),
        ("qweight", lambda t: t.float(), "q_proj.qweight is of dtype F32 and should be of I32"),
        ("g_idx", lambda t: t + 9, "q_proj.g_idx names groups that do not exist"),
        ("extra", lambda _: torch.ones(1), "unexpected tensors: .*q_proj.extra"),
    ],
)
def test_damaged_matrices_are_named(part: str, change: Any, words: str, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensor = tensors.pop(f"{Q_PROJ}.{part}", torch.zeros(1))
    if change is not None:
        tensors[f"{Q_PROJ}.{part}"] = change(tensor).contiguous()
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=words):
        load_decoder(checkpoint, load_config(checkpoint), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "shape"), [("awq", (12, 64)), ("gptq", (12, 64)), ("gptq", (16, 60))]
)
def test_a_side_that_no_words_hold_is_refused(name: str, shape: tuple[int, int]) -> None:
    form = packed_format(parse_quantization(FORMATS[name].quantization))
    assert form is not None
    with pytest.raises(CheckpointError, match=r"has a side of \d+, and words of 8"):
        form.parts("k_proj.weight", shape, {"k_proj.qweight"})


def test_a_norm_that_is_stored_quantized_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    norm = "model.layers.0.input_layernorm"
    tensors[f"{norm}.qweight"] = torch.zeros(1, 1, dtype=torch.int32)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight is stored quantized"):
        load_decoder(checkpoint, load_config(checkpoint), device=CPU, dtype=torch.float32)


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    tensors, name = load_file(path), "model.layers.0.mlp.up_proj.bias"
    save_file({**tensors, name: torch.zeros(192, dtype=torch.float16)}, path)
    load_decoder(checkpoint, load_config(checkpoint), device=CPU, dtype=torch.float32)
    save_file({**tensors, name: torch.ones(192, dtype=torch.float16)}, path)
    with pytest.raises(CheckpointError, match=r"unexpected tensors: .*up_proj.bias"):
        load_decoder(checkpoint, load_config(checkpoint), device=CPU, dtype=torch.float32)


def test_zero_points_that_the_configuration_promises_are_missed_by_name(tmp_path: Path) -> None:
    twin = write_checkpoint("qwen2", tmp_path / "twin", **SIZES)
    path = FORMATS["packed_4_asymmetric"].write(twin, tmp_path / "packed")
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{Q_PROJ}.weight_zero_point"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"missing tensors: .*q_proj.weight_zero_point"):
        load_decoder(path, load_config(path), device=CPU, dtype=torch.float32)


def change(checkpoint: Path, **fields: object) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({**AWQ, "version": "gemv"}, "version 'gemv'; known: gemm"),
        ({**AWQ, "bits": 8}, "8 bits; known: 4"),
        ({**AWQ, "group_size": 0}, "group_size must be -1, or"),
        (gptq_config(3, 64), "3 bits; known: 4, 8"),
        (gptq_config(4, 64, checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (gptq_config(4, 64, dynamic={"x": {}}), "dynamic"),
        (compressed("float-quantized", 8, None), "format 'float-quantized'; known: pack-quan"),
        (compressed("pack-quantized", 4, 64, type="float"), "type 'float'"),
        (compressed("pack-quantized", 4, None, strategy="block"), "strategy 'block'"),
        ({**compressed("pack-quantized", 4, 64), "config_groups": {}}, "0 config_groups, not 1"),
        (
            {**compressed("pack-quantized", 4, 64), "config_groups": [1]},
            "config_groups is no object",
        ),
        ({**compressed("pack-quantized", 4, 64), "kv_cache_scheme": {"x": 1}}, "kv_cache_scheme"),
        ({"quant_method": "bitsandbytes"}, "quantized with 'bitsandbytes' is not implemented"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    quantization: dict[str, Any], words: str, checkpoint: Path
) -> None:
    change(checkpoint, quantization_config=quantization)
    with pytest.raises(ModelError, match=words):
        load_config(checkpoint)


def test_a_family_that_was_not_tried_is_refused(checkpoint: Path) -> None:
    change(checkpoint, model_type="lfm2")
    with pytest.raises(UnsupportedModel, match="lfm2 quantized with 'gptq'"):
        load_config(checkpoint)
