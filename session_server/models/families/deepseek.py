"""Describe `deepseek_v2` (and V2-Lite) and `deepseek_v3`: MLA, and experts with shared ones."""

from __future__ import annotations

import math
from dataclasses import replace

from session_server.models import fields
from session_server.models.config import (
    ExpertLayout,
    LayerConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    RopeKind,
    RoutingConfig,
    ScoringFunc,
)
from session_server.models.errors import UnsupportedModel
from session_server.models.fields import RawConfig


def deepseek_v2(raw: RawConfig) -> ModelConfig:
    """Describe DeepSeek-V2 (2024); Lite projects queries directly and has one expert group."""
    fields.require_supported(raw, "topk_method", "greedy", "group_limited_greedy")
    fields.require_supported(raw, "scoring_func", "softmax")
    fields.require_supported(raw, "norm_topk_prob", False)
    is_grouped = raw.get("topk_method", "greedy") == "group_limited_greedy"
    routing = _routing(raw, ScoringFunc.SOFTMAX) if is_grouped else RoutingConfig()
    scale = float(raw.get("routed_scaling_factor") or 1.0)
    return _deepseek(raw, replace(routing, routed_scaling_factor=scale), num_dense=0)


def deepseek_v3(raw: RawConfig) -> ModelConfig:
    """Describe DeepSeek-V3 and R1 (2024); multi-token prediction layers are not loaded."""
    fields.require_supported(raw, "topk_method", "noaux_tc")
    fields.require_supported(raw, "scoring_func", "sigmoid")
    fields.require_supported(raw, "rope_interleave", True)
    scale = float(raw.get("routed_scaling_factor", 2.5))
    routing = replace(_routing(raw, ScoringFunc.SIGMOID), routed_scaling_factor=scale)
    num_further = raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 1))
    return replace(_deepseek(raw, routing, num_dense=3), num_nextn_predict_layers=num_further)


def _deepseek(raw: RawConfig, routing: RoutingConfig, *, num_dense: int) -> ModelConfig:
    """Describe what both have in common; `num_dense` is the default of `first_k_dense_replace`."""
    fields.require_supported(raw, "moe_layer_freq", 1)
    fields.require_supported(raw, "mlp_bias", False)
    mixer, dense_ffn = _mixer(raw), fields.silu_mlp(raw)
    num_dense = raw.get("first_k_dense_replace", num_dense)
    num_layers = fields.integer(raw, "num_hidden_layers")
    experts = _experts(raw, routing) if num_dense < num_layers else dense_ffn
    layers = (
        LayerConfig(mixer, dense_ffn if index < num_dense else experts)
        for index in range(num_layers)
    )
    return fields.model(raw, layers, fields.norm(raw))


def _mixer(raw: RawConfig) -> MlaConfig:
    rope = fields.one_rope(raw)
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    sizes = {name: fields.integer(raw, name) for name in names}
    for name, size in sizes.items():
        if size % 2 != 0:
            raise UnsupportedModel(f"{name} {size} is odd, which is not implemented")
    has_q_rank = raw.get("q_lora_rank") is not None
    return MlaConfig(
        num_heads=fields.integer(raw, "num_attention_heads"),
        **sizes,
        q_lora_rank=fields.integer(raw, "q_lora_rank") if has_q_rank else None,
        v_head_dim=fields.integer(raw, "v_head_dim"),
        scale=_scale(raw, rope) / math.sqrt(sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]),
        rope=rope,
        attention_bias=bool(raw.get("attention_bias", False)),
    )


def _scale(raw: RawConfig, rope: RopeConfig) -> float:
    """Return the factor on the scores of scaled positions: the square of YaRN's temperature.

    Cosines and sines carry only the part of it that `mscale` gives (Peng et al. 2023).
    """
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    weight = settings.get("mscale_all_dim")
    if rope.rope_type is RopeKind.DEFAULT or not weight:
        return 1.0
    return fields.yarn_magnitude(rope.factor, float(weight)) ** 2


def _experts(raw: RawConfig, routing: RoutingConfig) -> MoeConfig:
    num_experts = fields.integer(raw, "n_routed_experts")
    if num_experts % routing.n_group != 0:
        raise UnsupportedModel(
            f"{num_experts} routed experts do not divide over {routing.n_group} groups"
        )
    expert = fields.silu_mlp(raw, "moe_intermediate_size")
    num_shared = raw.get("n_shared_experts") or 0
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=fields.integer(raw, "num_experts_per_tok"),
        expert=expert,
        norm_topk_prob=bool(raw.get("norm_topk_prob", routing.scoring_func is ScoringFunc.SIGMOID)),
        layout=ExpertLayout.QWEN,
        routing=routing,
        shared_expert=replace(expert, intermediate_size=num_shared * expert.intermediate_size)
        if num_shared
        else None,
    )


def _routing(raw: RawConfig, scoring: ScoringFunc) -> RoutingConfig:
    return RoutingConfig(scoring, fields.integer(raw, "n_group"), fields.integer(raw, "topk_group"))
