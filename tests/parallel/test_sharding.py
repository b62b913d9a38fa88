"""What does not divide is refused by name, and parts add up to the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from session_server.demo import MODEL_DIR
from session_server.models.config import ModelConfig
from session_server.models.registry import parse_config
from session_server.parallel.loading import load_ranks, torch_options
from session_server.parallel.sharding import fused_parts, shard_config
from session_server.runner.loader import Quantization, RunnerOptions
from session_server.runner.paged_decoder import BackendName
from tests.models.raw_configs import RAW_CONFIGS

OPTIONS = RunnerOptions(page_size=16, num_rows=2, device="cpu")


def config_of(family: str) -> ModelConfig:
    return parse_config(RAW_CONFIGS[family])


@pytest.mark.parametrize(
    ("family", "size", "what"),
    [
        ("llama", 4, "6 attention heads"),
        ("llama", 3, "2 KV heads"),
        ("mistral", 6, "80 elements of a feed-forward"),
        ("deepseek_v3", 4, "6 attention heads"),
        ("qwen3_moe", 4, "6 attention heads"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(family: str, size: int, what: str) -> None:
    with pytest.raises(ValueError, match=rf"^--tensor-parallel-size {size}: {what} cannot be"):
        shard_config(config_of(family), size)


def test_a_refusal_starts_no_process() -> None:
    with pytest.raises(ValueError, match="--tensor-parallel-size 4: 6 attention heads"):
        load_ranks(MODEL_DIR, OPTIONS, 4)


@pytest.mark.parametrize("family", RAW_CONFIGS)
def test_two_halves_are_as_large_as_the_whole_where_anything_is_cut(family: str) -> None:
    whole = config_of(family)
    half = shard_config(whole, 2)
    for layer, part in zip(whole.layers, half.layers, strict=True):
        assert layer.mixer != part.mixer
        assert layer.ffn != part.ffn
        assert layer.mixer.pool == part.mixer.pool
    assert replace(half, layers=whole.layers) == whole


def test_ranks_beyond_the_kv_heads_hold_copies() -> None:
    mixer = shard_config(config_of("llama"), 2).layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads) == (3, 1)
    whole = config_of("llama")
    few = tuple(replace(x, mixer=replace(x.mixer, num_kv_heads=1)) for x in whole.layers)
    mixer = shard_config(replace(whole, layers=few), 2).layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads) == (3, 1)


@pytest.mark.parametrize(
    ("family", "name", "parts"),
    [
        ("llama", "model.layers.0.mlp.down_proj.weight", (1,)),
        ("lfm2", "model.layers.0.conv.in_proj.weight", (1, 1, 1)),
        ("granitemoehybrid", "model.layers.0.mamba.in_proj.weight", (96, 96, 20, 20, 8)),
        ("granitemoehybrid", "model.layers.0.mamba.conv1d.bias", (96, 20, 20)),
        ("granitemoehybrid", "model.layers.0.shared_mlp.input_linear.weight", (1, 1)),
        ("qwen3_5_text", "model.layers.0.linear_attn.in_proj_qkv.weight", (16, 16, 40)),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", (1, 1)),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", (1,)),
    ],
)
def test_fused_tensors_are_cut_part_by_part(family: str, name: str, parts: tuple[int, ...]) -> None:
    assert fused_parts(config_of(family), name) == parts


@pytest.mark.parametrize(
    ("quantize", "backend", "told"),
    [
        ("int8", "auto", "--quantize int8 cannot be used with it"),
        ("none", "native", "--attention-backend native cannot be used with it"),
        ("none", "triton", "--attention-backend triton cannot be used with it"),
    ],
)
def test_kernels_of_our_own_are_refused(
    quantize: Quantization, backend: BackendName, told: str
) -> None:
    refused = f"--tensor-parallel-size 2 is computed by torch, so {told}"
    with pytest.raises(ValueError, match=refused):
        torch_options(replace(OPTIONS, quantize=quantize, backend=backend), 2)
    assert torch_options(OPTIONS, 2).backend == "cpu"
