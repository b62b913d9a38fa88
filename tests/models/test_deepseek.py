"""What DeepSeek configurations describe and what of them is refused; who is routed where."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cache.spec import LayerKind
from session_server.models.config import (
    LATENT_POOL,
    MlaConfig,
    MlpConfig,
    MoeConfig,
    RoutingConfig,
    ScoringFunc,
)
from session_server.models.errors import CheckpointError, UnsupportedModel
from session_server.models.layers.linear import PlainLinear
from session_server.models.layers.routing import Router
from session_server.models.registry import parse_config

V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
V3: dict[str, Any] = {
    **V2_LITE,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 1,
}


def as_v5(raw: dict[str, Any]) -> dict[str, Any]:
    """As `save_pretrained` of transformers 5 writes it."""
    old = ("rope_theta", "rope_scaling", "scoring_func", "topk_method", "moe_layer_freq")
    kept = {key: value for key, value in raw.items() if key not in old}
    scaling = {key: value for key, value in raw["rope_scaling"].items() if key != "type"}
    rope = {**scaling, "rope_type": "yarn", "rope_theta": raw["rope_theta"]}
    return {**kept, "head_dim": raw["qk_rope_head_dim"], "rope_parameters": rope}


@pytest.mark.parametrize("raw", [V2_LITE, V3], ids=["v2-lite", "v3"])
def test_both_spellings_are_the_same_model(raw: dict[str, Any]) -> None:
    assert parse_config(as_v5(raw)) == parse_config(raw)


def test_v2_lite_caches_a_ninth_of_its_keys_and_values() -> None:
    config = parse_config(V2_LITE)
    mixer = config.layers[0].mixer
    assert isinstance(mixer, MlaConfig)
    assert (mixer.q_lora_rank, mixer.kv_lora_rank, mixer.qk_rope_head_dim) == (None, 512, 64)
    # Cosines and sines are not stretched where both weights are the same; scores are.
    assert mixer.rope.attention_factor == 1.0
    temperature = 0.1 * 0.707 * math.log(40) + 1
    assert mixer.scale == pytest.approx(temperature**2 / math.sqrt(192))
    (group,) = config.cache_spec(16, "bfloat16").groups
    assert (group.pool, group.kind, group.qk_rope_head_dim) == (LATENT_POOL, LayerKind.LATENT, 64)
    assert group.bytes_per_token == 27 * 576 * 2
    assert 27 * 16 * (192 + 128) * 2 / group.bytes_per_token > 8.8


def test_the_lower_layers_are_dense_and_the_others_share_experts() -> None:
    lite, v3 = parse_config(V2_LITE), parse_config(V3)
    assert [isinstance(layer.ffn, MlpConfig) for layer in lite.layers[:3]] == [True, False, False]
    assert [isinstance(layer.ffn, MlpConfig) for layer in v3.layers[:4]] == [True] * 3 + [False]
    of_lite, of_v3 = lite.layers[-1].ffn, v3.layers[-1].ffn
    assert isinstance(of_lite, MoeConfig)
    assert isinstance(of_v3, MoeConfig)
    assert of_lite.shared_expert == MlpConfig(2816)
    assert of_lite.routing == RoutingConfig()
    assert of_v3.routing == RoutingConfig(ScoringFunc.SIGMOID, 8, 4, 2.5)
    assert (of_lite.norm_topk_prob, of_v3.norm_topk_prob) == (False, True)
    assert (lite.num_nextn_predict_layers, v3.num_nextn_predict_layers) == (0, 1)


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob True"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (V2_LITE, {"mlp_bias": True}, "mlp_bias True"),
        (V2_LITE, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (V2_LITE, {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        (V2_LITE, {"kv_lora_rank": 511}, "kv_lora_rank 511 is odd"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (V3, {"rope_interleave": False}, "rope_interleave False"),
        (V3, {"n_group": 7}, "256 routed experts do not divide over 7 groups"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    raw: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**raw, **change})


@pytest.mark.parametrize("key", ["kv_lora_rank", "v_head_dim", "n_routed_experts"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} must be a positive integer"):
        parse_config({name: value for name, value in V2_LITE.items() if name != key})


@pytest.mark.parametrize("scoring", ScoringFunc)
@pytest.mark.parametrize("topk_group", [1, 2, 4])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_a_token_goes_to_the_best_experts_of_the_best_groups(
    scoring: ScoringFunc, topk_group: int, *, norm_topk_prob: bool
) -> None:
    generator = torch.Generator().manual_seed(topk_group)
    weight, x = (torch.randn(n, 6, generator=generator) for n in (12, 40))
    bias = torch.randn(12, generator=generator) if scoring is ScoringFunc.SIGMOID else None
    config = MoeConfig(
        num_experts=12,
        num_experts_per_tok=3,
        expert=MlpConfig(8),
        norm_topk_prob=norm_topk_prob,
        layout=parse_config(V3).layers[-1].ffn.layout,
        routing=RoutingConfig(scoring, 4, topk_group, 2.5),
    )
    weights, chosen = Router(PlainLinear(weight, None), config, bias)(x)
    for token in range(len(x)):
        of_experts = written_out(weight @ x[token], config, bias)
        assert set(chosen[token].tolist()) == of_experts.keys()
        for expert, value in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            assert value == pytest.approx(of_experts[expert], abs=1e-5)


def written_out(scores: Tensor, config: MoeConfig, bias: Tensor | None) -> dict[int, float]:
    """The weight of every chosen expert."""
    routing, size = config.routing, config.num_experts // config.routing.n_group
    is_softmax = routing.scoring_func is ScoringFunc.SOFTMAX
    shares = (scores.softmax(0) if is_softmax else scores.sigmoid()).tolist()
    merits = shares if bias is None else [a + b for a, b in zip(shares, bias.tolist(), strict=True)]

    def merit_of(group: int) -> float:
        best = sorted(merits[group * size : (group + 1) * size])
        return best[-1] if is_softmax else best[-1] + best[-2]

    groups = sorted(range(routing.n_group), key=merit_of)[-routing.topk_group :]
    allowed = [expert for expert in range(config.num_experts) if expert // size in groups]
    chosen = sorted(allowed, key=lambda expert: merits[expert])[-config.num_experts_per_tok :]
    total = sum(shares[expert] for expert in chosen) if config.norm_topk_prob else 1.0
    return {expert: shares[expert] / total * routing.routed_scaling_factor for expert in chosen}
