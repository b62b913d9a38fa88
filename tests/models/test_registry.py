"""Configurations as they are found in the wild, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cache.spec import LayerKind
from session_server.models.config import FULL_POOL, WINDOW_POOL, MlpConfig, QkNorm, RopeKind
from session_server.models.errors import CheckpointError, UnsupportedModel
from session_server.models.registry import load_config, parse_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def test_a_llama_of_transformers_4() -> None:
    config = parse_config(
        {
            **BASE,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "torch_dtype": "bfloat16",
        }
    )
    rope = config.layers[0].mixer.rope
    assert rope.rope_type is RopeKind.LLAMA3
    assert (rope.rope_theta, rope.factor) == (500000.0, 8.0)
    assert (rope.low, rope.high) == (1.0, 4.0)
    assert rope.original_max_position_embeddings == 8192
    assert config.max_position_embeddings == 131072
    assert config.dtype == "bfloat16"
    assert len(config.layers) == 3
    mixer = config.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (8, 2, 8)
    assert not any((mixer.qkv_bias, mixer.output_bias, mixer.has_sinks))
    assert mixer.qk_norm is QkNorm.NONE
    assert not config.tie_word_embeddings


def test_both_spellings_of_rotary_settings_are_the_same_model() -> None:
    rope = {"factor": 4.0, "original_max_position_embeddings": 1024}
    v4 = parse_config({**BASE, "rope_theta": 1e6, "rope_scaling": {"type": "yarn", **rope}})
    v5 = parse_config({**BASE, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **rope}})
    assert v4 == v5


def test_qwen_models_differ_where_they_should() -> None:
    qwen2 = parse_config({**BASE, "model_type": "qwen2", "tie_word_embeddings": True})
    qwen3 = parse_config({**BASE, "model_type": "qwen3", "head_dim": 32})
    assert qwen2.layers[0].mixer.qkv_bias
    assert not qwen2.layers[0].mixer.output_bias
    assert qwen2.tie_word_embeddings
    assert qwen3.layers[0].mixer.qk_norm is QkNorm.HEAD
    assert not qwen3.layers[0].mixer.qkv_bias
    assert qwen3.layers[0].mixer.head_dim == 32


def test_llama_biases_are_read() -> None:
    config = parse_config({**BASE, "attention_bias": True, "mlp_bias": True})
    assert config.layers[0].mixer.qkv_bias
    assert config.layers[0].mixer.output_bias
    assert isinstance(config.layers[0].ffn, MlpConfig)
    assert config.layers[0].ffn.bias


def test_without_kv_heads_every_head_has_its_own() -> None:
    raw = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert parse_config(raw).layers[0].mixer.num_kv_heads == 8


def test_the_layers_of_mistral_have_its_window() -> None:
    config = parse_config({**BASE, "model_type": "mistral", "sliding_window": 1000})
    assert config.max_position_embeddings == 4096
    assert config.pools == {WINDOW_POOL: (0, 1, 2)}
    assert {layer.mixer.sliding_window for layer in config.layers} == {1000}


def test_the_upper_layers_of_qwen_have_a_window_where_one_is_used() -> None:
    window = {"sliding_window": 1000, "use_sliding_window": True, "max_window_layers": 1}
    config = parse_config({**BASE, "model_type": "qwen2", **window})
    assert config.pools == {FULL_POOL: (0,), WINDOW_POOL: (1, 2)}


def test_all_layers_of_qwen_with_experts_have_its_window() -> None:
    window = {"sliding_window": 1000, "use_sliding_window": True}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = parse_config({**BASE, "model_type": "qwen3_moe", **window, **experts})
    assert config.pools == {WINDOW_POOL: (0, 1, 2)}


@pytest.mark.parametrize(
    ("model_type", "window"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 4096}),
        ("mistral", {}),
        ("qwen2", {"sliding_window": 1000, "use_sliding_window": False}),
        ("qwen3", {"sliding_window": 1000}),
    ],
)
def test_a_window_that_is_off_or_wide_enough_changes_nothing(
    model_type: str, window: dict[str, Any]
) -> None:
    config = parse_config({**BASE, "model_type": model_type, **window})
    assert config.max_position_embeddings == 4096
    assert config.pools == {FULL_POOL: (0, 1, 2)}


def test_yarn_of_a_short_configured_context_reaches_its_stretched_length() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = parse_config({**BASE, "max_position_embeddings": 32768, "rope_scaling": scaling})
    assert config.max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'.*qwen3"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "8 attention heads.* 3 "),
        ({"head_dim": 7}, "head_dim 7"),
        ({"quantization_config": {"quant_method": "quanto"}}, "quantization_config"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config({**BASE, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_a_missing_field_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_config({**BASE, **change})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        (json.dumps({**BASE, "rms_norm_eps": "small"}), "must be a number"),
        (json.dumps({**BASE, "rope_scaling": [1]}), "must be an object"),
    ],
)
def test_a_broken_file_is_an_error_that_says_so(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=named):
        load_config(tmp_path)


def test_a_directory_without_a_configuration_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_config(tmp_path)


def test_the_cache_spec_is_what_the_layers_store() -> None:
    spec = parse_config(BASE).cache_spec(16, "bfloat16")
    (group,) = spec.groups
    assert group.kind is LayerKind.FULL
    assert group.layers == (0, 1, 2)
    # K and V, 3 layers, 2 heads of 8, 2 bytes, 16 positions.
    assert spec.bytes_per_page == 2 * 3 * 2 * 8 * 2 * 16
