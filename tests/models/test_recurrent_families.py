"""Families with recurrent layers: what v4 and v5 configurations describe, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cache.spec import LayerKind
from session_server.models.config import (
    FULL_POOL,
    STATE_POOL,
    AttentionConfig,
    ExpertLayout,
    GatedDeltaConfig,
    Mamba2Config,
    MlpConfig,
    MlpLayout,
    MoeConfig,
    ShortConvConfig,
)
from session_server.models.errors import CheckpointError, UnsupportedModel
from session_server.models.registry import parse_config

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LFM2 = {
    **BASE,
    "model_type": "lfm2",
    "full_attn_idxs": [2],
    "conv_L_cache": 3,
    "block_ff_dim": 240,
    "block_multiple_of": 32,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_embedding": True,
}
GRANITE = {
    **BASE,
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
    "mamba_n_groups": 2,
    "shared_intermediate_size": 96,
    "num_local_experts": 6,
    "attention_multiplier": 0.0625,
    "embedding_multiplier": 12,
    "logits_scaling": 8,
    "residual_multiplier": 0.22,
    "position_embedding_type": "nope",
}
QWEN = {
    **BASE,
    "model_type": "qwen3_5_text",
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def test_lfm2_in_the_spelling_of_transformers_4() -> None:
    config = parse_config(LFM2)
    assert config.pools == {FULL_POOL: (2,), STATE_POOL: (0, 1, 3)}
    assert config.layers[0].mixer == ShortConvConfig(channels=64, conv_kernel_size=3)
    # 240 -> two thirds of it, up to a multiple of 32.
    assert config.layers[0].ffn == MlpConfig(160, layout=MlpLayout.LFM2)
    assert config.tie_word_embeddings
    as_it_is = parse_config({**LFM2, "block_auto_adjust_ff_dim": False})
    assert as_it_is.layers[0].ffn == MlpConfig(240, layout=MlpLayout.LFM2)


def test_lfm2_in_the_spelling_of_transformers_5() -> None:
    raw = {key: value for key, value in LFM2.items() if key not in {"full_attn_idxs", "rope_theta"}}
    raw["layer_types"] = ["conv", "conv", "full_attention", "conv"]
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    assert parse_config(raw) == parse_config(LFM2)


def test_granite_in_both_spellings() -> None:
    config = parse_config(GRANITE)
    v5_names = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    limits = [0.0, {"__float__": "Infinity"}]
    assert parse_config({**GRANITE, "layer_types": v5_names, "time_step_limit": limits}) == config
    assert config.pools == {FULL_POOL: (2,), STATE_POOL: (0, 1, 3)}
    assert config.layers[0].mixer == Mamba2Config(8, 16, 2, 24, 4, (0.0, math.inf))
    attention, ffn = config.layers[2].mixer, config.layers[2].ffn
    assert isinstance(attention, AttentionConfig)
    assert (attention.rope, attention.scale) == (None, 0.0625)
    assert isinstance(ffn, MoeConfig)
    assert ffn.layout is ExpertLayout.GRANITE
    assert ffn.shared_expert == MlpConfig(96, layout=MlpLayout.GRANITE)
    assert (config.embedding_multiplier, config.norm.final_scale) == (12.0, 0.125)
    assert config.layers[0].residual_multiplier == 0.22


def test_granite_with_positions_and_without_experts() -> None:
    config = parse_config({**GRANITE, "position_embedding_type": "rope", "num_local_experts": 0})
    attention = config.layers[2].mixer
    assert isinstance(attention, AttentionConfig)
    assert attention.rope is not None
    assert config.layers[0].ffn == MlpConfig(96, layout=MlpLayout.GRANITE)


def test_granite_without_multipliers_multiplies_by_one() -> None:
    raw = {key: value for key, value in GRANITE.items() if not key.endswith("_multiplier")}
    config = parse_config({key: value for key, value in raw.items() if key != "logits_scaling"})
    attention = config.layers[2].mixer
    assert isinstance(attention, AttentionConfig)
    assert (attention.scale, config.embedding_multiplier, config.norm.final_scale) == (1, 1, 1)
    assert config.layers[0].residual_multiplier == 1


def test_every_fourth_layer_of_qwen3_5_is_gated_attention_rotated_in_part() -> None:
    config = parse_config(QWEN)
    assert config.pools == {FULL_POOL: (3,), STATE_POOL: (0, 1, 2)}
    assert config.layers[0].mixer == GatedDeltaConfig(2, 4, 8, 16, 4)
    attention = config.layers[3].mixer
    assert isinstance(attention, AttentionConfig)
    assert attention.is_gated
    assert attention.rope is not None
    assert (attention.rope.rope_theta, attention.rotary_dim) == (1e7, 8)


def test_qwen3_5_without_a_word_on_rotation() -> None:
    raw = {key: value for key, value in QWEN.items() if key != "rope_parameters"}
    attention = parse_config(raw).layers[3].mixer
    assert isinstance(attention, AttentionConfig)
    assert attention.rope is not None
    assert (attention.rope.rope_theta, attention.rotary_dim) == (10_000.0, 8)


@pytest.mark.parametrize(
    ("raw", "elements"),
    [
        (LFM2, 2 * 64),
        (GRANITE, 3 * (128 + 2 * 2 * 24) + 8 * 16 * 24),
        (QWEN, 3 * (2 * 16 + 64) + 4 * 8 * 16),
    ],
    ids=["lfm2", "granite", "qwen3_5"],
)
def test_a_state_is_fp32_and_takes_what_its_parts_take(raw: dict[str, Any], elements: int) -> None:
    full, state = parse_config(raw).cache_spec(16, "bfloat16").groups
    assert full.kind is LayerKind.FULL
    assert state.kind is LayerKind.RECURRENT
    assert state.bytes_per_state == 3 * elements * 4
    assert state.bytes_per_token == 0


@pytest.mark.parametrize(
    ("raw", "change", "error", "named"),
    [
        (LFM2, {"full_attn_idxs": []}, UnsupportedModel, "without a layer of attention"),
        (LFM2, {"layer_types": ["ssm"] * 4}, UnsupportedModel, "layer_types ssm"),
        (LFM2, {"conv_L_cache": 0}, CheckpointError, "conv_L_cache"),
        (GRANITE, {"layer_types": ["mamba"] * 4}, UnsupportedModel, "without a layer of attention"),
        (GRANITE, {"mamba_d_head": 15}, CheckpointError, "Mamba heads of 15"),
        (GRANITE, {"position_embedding_type": "alibi"}, UnsupportedModel, "alibi"),
        (QWEN, {"linear_num_value_heads": 3}, UnsupportedModel, "3 value heads"),
        (QWEN, {"layer_types": ["linear_attention"] * 4}, UnsupportedModel, "of attention"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    raw: dict[str, Any], change: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        parse_config({**raw, **change})
