"""Describe mixtures of experts over GQA: `qwen3_moe`, `gpt_oss`."""

from __future__ import annotations

from dataclasses import replace

from session_server.models import fields
from session_server.models.config import (
    ExpertLayout,
    GateConfig,
    GateKind,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from session_server.models.families import dense
from session_server.models.fields import RawConfig


def qwen3_moe(raw: RawConfig) -> ModelConfig:
    """Describe Qwen 3 MoE: experts in all layers, in every `decoder_sparse_step`th, or in some."""
    window = dense.qwen_window(raw)
    windows = fields.layer_windows(raw, window, lambda _: window is not None)
    mixer = dense.qwen3_mixer(raw)
    ffns = (_qwen3_ffn(raw, index) for index in range(len(windows)))
    layers = (
        LayerConfig(replace(mixer, sliding_window=window), ffn)
        for window, ffn in zip(windows, ffns, strict=True)
    )
    return fields.model(raw, layers, fields.norm(raw))


def _qwen3_ffn(raw: RawConfig, index: int) -> MlpConfig | MoeConfig:
    has_experts = (index + 1) % raw.get("decoder_sparse_step", 1) == 0
    if not has_experts or index in (raw.get("mlp_only_layers") or ()):
        return fields.silu_mlp(raw)
    num_experts = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    return MoeConfig(
        num_experts=fields.integer(raw, num_experts),
        num_experts_per_tok=fields.integer(raw, "num_experts_per_tok"),
        expert=fields.silu_mlp(raw, "moe_intermediate_size"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        layout=ExpertLayout.QWEN,
    )


def gpt_oss(raw: RawConfig) -> ModelConfig:
    """Describe gpt-oss (OpenAI 2025): sinks, clamped gates, biases; every second layer is full."""
    mixer = fields.biased_attention(
        {"attention_bias": True, **raw}, fields.one_rope(raw), head_dim=64
    )
    mixer = replace(mixer, has_sinks=True)
    window = fields.integer(raw, "sliding_window")
    windows = fields.layer_windows(raw, window, lambda index: index % 2 == 0)
    fields.require_supported(raw, "hidden_act", "silu", "swish")
    gate = GateConfig(
        GateKind.CLAMPED,
        alpha=float(raw.get("swiglu_alpha", 1.702)),
        swiglu_limit=float(raw.get("swiglu_limit", 7.0)),
    )
    ffn = MoeConfig(
        num_experts=fields.integer(raw, "num_local_experts"),
        num_experts_per_tok=fields.integer(raw, "num_experts_per_tok"),
        expert=MlpConfig(fields.integer(raw, "intermediate_size"), bias=True, gate=gate),
        norm_topk_prob=True,
        layout=ExpertLayout.GPT_OSS,
        router_bias=True,
    )
    layers = fields.windowed_layers(mixer, mixer, ffn, windows)
    return fields.model(raw, layers, fields.norm(raw, 1e-5))
