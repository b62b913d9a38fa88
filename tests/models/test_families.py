"""What each family's configuration describes, in both spellings, and what of it is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cache.spec import LayerKind
from session_server.models.config import (
    FULL_POOL,
    WINDOW_POOL,
    GateKind,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    NormPlacement,
    QkNorm,
    RopeConfig,
    RopeKind,
)
from session_server.models.errors import CheckpointError, UnsupportedModel
from session_server.models.registry import parse_config

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
}
GEMMA2 = {
    **BASE,
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 144,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rope_theta": 10000.0,
}
GEMMA3 = {
    **BASE,
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window_pattern": 3,
}
OLMO3 = {
    **BASE,
    "model_type": "olmo3",
    "hidden_act": "silu",
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.2,
    },
}
GPT_OSS = {
    **BASE,
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "attention_bias": True,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
QWEN3_MOE = {
    **BASE,
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.mixer.sliding_window for layer in config.layers]


def test_gemma2_alternates_and_caps() -> None:
    config = parse_config(GEMMA2)
    assert windows(config) == [512, None] * 3
    assert config.norm.placement is NormPlacement.SANDWICH
    assert config.norm.adds_one
    assert config.tie_word_embeddings
    assert config.embedding_multiplier == 8.0
    assert config.final_logit_softcapping == 30.0
    mixer = config.layers[0].mixer
    assert (mixer.attn_logit_softcapping, mixer.scale) == (50.0, 1 / 12)
    ffn = config.layers[0].ffn
    assert isinstance(ffn, MlpConfig)
    assert ffn.gate.kind is GateKind.GELU_TANH


def test_gemma3_turns_faster_in_the_layers_that_see_little() -> None:
    config = parse_config(GEMMA3)
    assert windows(config) == [512, 512, None] * 2
    assert config.layers[0].mixer.rope == RopeConfig(10_000.0)
    assert config.layers[2].mixer.rope == RopeConfig(1_000_000.0, RopeKind.LINEAR, 8.0)
    assert {layer.mixer.qk_norm for layer in config.layers} == {QkNorm.HEAD}
    assert {layer.mixer.scale for layer in config.layers} == {1 / 16}
    assert config.final_logit_softcapping is None


def test_olmo3_norms_what_comes_out_and_stretches_full_layers_only() -> None:
    config = parse_config(OLMO3)
    assert windows(config) == [512, 512, 512, None, 512, 512]
    assert config.norm.placement is NormPlacement.POST
    assert not config.norm.adds_one
    assert {layer.mixer.qk_norm for layer in config.layers} == {QkNorm.PROJECTION}
    assert config.layers[0].mixer.rope == RopeConfig(500_000.0)
    assert config.layers[3].mixer.rope.rope_type is RopeKind.YARN
    assert config.layers[3].mixer.rope.rope_theta == 500_000.0


def test_gpt_oss_has_sinks_and_clamped_experts() -> None:
    config = parse_config(GPT_OSS)
    assert windows(config) == [512, None] * 3
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    assert mixer.has_sinks
    assert mixer.qkv_bias
    assert mixer.output_bias
    assert mixer.rope.rope_type is RopeKind.YARN
    assert not mixer.rope.truncate
    assert math.isclose(mixer.rope.attention_factor, 0.1 * math.log(32) + 1)
    assert isinstance(ffn, MoeConfig)
    assert (ffn.num_experts, ffn.num_experts_per_tok, ffn.norm_topk_prob, ffn.router_bias) == (
        4,
        2,
        True,
        True,
    )
    assert (ffn.expert.gate.kind, ffn.expert.gate.swiglu_limit) == (GateKind.CLAMPED, 7.0)
    assert ffn.expert.bias


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({}, []),
        ({"mlp_only_layers": [1, 4]}, [1, 4]),
        ({"decoder_sparse_step": 2}, [0, 2, 4]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [0, 1, 2, 3, 4]),
    ],
)
def test_qwen3_moe_has_dense_layers_where_it_says(change: dict[str, Any], dense: list[int]) -> None:
    config = parse_config({**QWEN3_MOE, **change})
    ffns = [layer.ffn for layer in config.layers]
    assert [i for i, ffn in enumerate(ffns) if isinstance(ffn, MlpConfig)] == dense
    for ffn in ffns:
        if isinstance(ffn, MoeConfig):
            assert ffn.expert.intermediate_size == 32
        else:
            assert ffn.intermediate_size == 160


def v5(raw: dict[str, Any], types: list[str], rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The same configuration as `save_pretrained` of transformers 5 writes it."""
    gone = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
    kept = {key: value for key, value in raw.items() if key not in gone}
    return {**kept, "rope_parameters": rope, "layer_types": types, **more}


WINDOWED, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("v4_style", "v5_style"),
    [
        (
            GEMMA2,
            v5(GEMMA2, [WINDOWED, FULL] * 3, {"rope_type": "default", "rope_theta": 10000.0}),
        ),
        (
            GEMMA3,
            v5(
                GEMMA3,
                [WINDOWED, WINDOWED, FULL] * 2,
                {
                    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                    WINDOWED: {"rope_type": "default", "rope_theta": 10_000.0},
                },
            ),
        ),
        (
            OLMO3,
            v5(
                OLMO3,
                [WINDOWED] * 3 + [FULL] + [WINDOWED] * 2,
                {
                    FULL: {**OLMO3["rope_scaling"], "rope_theta": 500_000.0},
                    WINDOWED: {"rope_type": "default", "rope_theta": 500_000.0},
                },
            ),
        ),
        (
            GPT_OSS,
            v5(
                GPT_OSS,
                [WINDOWED, FULL] * 3,
                {**GPT_OSS["rope_scaling"], "rope_theta": 150_000.0},
            ),
        ),
        (
            QWEN3_MOE,
            {
                **{key: value for key, value in QWEN3_MOE.items() if key != "num_experts"},
                "num_local_experts": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        ),
    ],
    ids=["gemma2", "gemma3_text", "olmo3", "gpt_oss", "qwen3_moe"],
)
def test_both_spellings_are_the_same_model(
    v4_style: dict[str, Any], v5_style: dict[str, Any]
) -> None:
    assert parse_config(v4_style) == parse_config(v5_style)


@pytest.mark.parametrize(
    ("raw", "change", "named"),
    [
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (GEMMA2, {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        (GEMMA2, {"layer_types": ["chunked_attention"] * 6}, "chunked_attention"),
        (GEMMA2, {"quantization_config": {"quant_method": "mxfp4"}}, "gemma2.*'mxfp4'"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50"),
        (GPT_OSS, {"quantization_config": {"quant_method": "awq"}}, "gpt_oss.*'awq'"),
        (QWEN3_MOE, {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({**BASE, "model_type": "mistral"}, {"layer_types": [FULL] * 6}, "layer_types"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    raw: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config({**raw, **change})


@pytest.mark.parametrize(
    ("raw", "change", "named"),
    [
        (GEMMA2, {"layer_types": [FULL]}, "6 layers, and 1 layer_types"),
        (GEMMA3, {"sliding_window": None}, "sliding_window"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (GPT_OSS, {"num_local_experts": None}, "num_local_experts"),
    ],
)
def test_a_field_that_is_missing_or_contradicts_is_named(
    raw: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_config({**raw, **change})


def test_full_and_windowed_layers_are_stored_apart() -> None:
    spec = parse_config(GEMMA3).cache_spec(16, "float32")
    full, windowed = spec.groups
    assert (full.pool, full.kind, full.layers, full.window) == (
        FULL_POOL,
        LayerKind.FULL,
        (2, 5),
        0,
    )
    assert (windowed.pool, windowed.kind) == (WINDOW_POOL, LayerKind.WINDOW)
    assert (windowed.layers, windowed.window) == ((0, 1, 3, 4), 512)
