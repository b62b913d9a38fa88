"""Describe `granitemoehybrid`: Mamba2 between layers of attention, with or without experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from session_server.models import fields
from session_server.models.config import (
    AttentionConfig,
    ExpertLayout,
    LayerConfig,
    Mamba2Config,
    MixerConfig,
    MlpConfig,
    MlpLayout,
    ModelConfig,
    MoeConfig,
    Spelling,
)
from session_server.models.errors import CheckpointError
from session_server.models.fields import RawConfig

_IS_MAMBA: Final[Mapping[str, bool]] = {
    "linear_attention": True,
    "full_attention": False,
    "mamba": True,
    "attention": False,
}
"""Layer types in the spelling of v5, then in that of v4."""


def granite(raw: RawConfig) -> ModelConfig:
    """Describe Granite 4 (IBM 2025).

    Attention usually has no position embeddings; embeddings, scores, residuals and logits have
    factors.
    """
    mixers: dict[bool, MixerConfig] = {True: _mamba2(raw), False: _attention(raw)}
    default_types = ["linear_attention"] * fields.integer(raw, "num_hidden_layers")
    ffn, scale = _ffn(raw), float(raw.get("residual_multiplier") or 1.0)
    layers = [
        LayerConfig(mixers[_IS_MAMBA[name]], ffn, scale)
        for name in fields.layer_types(raw, default_types, _IS_MAMBA)
    ]
    final_scale = 1.0 / float(raw.get("logits_scaling") or 1.0)
    norm = replace(fields.norm(raw), final_scale=final_scale)
    return replace(
        fields.model(raw, layers, norm),
        embedding_multiplier=float(raw.get("embedding_multiplier") or 1.0),
        spelling=Spelling(ffn="" if isinstance(ffn, MoeConfig) else "shared_mlp."),
    )


def _attention(raw: RawConfig) -> AttentionConfig:
    fields.require_supported(raw, "position_embedding_type", "rope", "nope")
    is_rotated = raw.get("position_embedding_type") == "rope"
    mixer = fields.biased_attention(raw, fields.one_rope(raw))
    scale = float(raw.get("attention_multiplier") or 1.0)
    return replace(mixer, rope=mixer.rope if is_rotated else None, scale=scale)


def _mamba2(raw: RawConfig) -> Mamba2Config:
    inner = int(raw.get("mamba_expand", 2) * fields.integer(raw, "hidden_size"))
    num_heads = fields.integer({"mamba_n_heads": 128, **raw}, "mamba_n_heads")
    head_dim = raw.get("mamba_d_head", "auto")
    if head_dim != "auto" and head_dim * num_heads != inner:
        raise CheckpointError(
            f"config.json: {num_heads} Mamba heads of {head_dim} are not {inner} elements"
        )
    low, high = raw.get("time_step_limit") or (0.0, math.inf)
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=inner // num_heads,
        n_groups=fields.integer({"mamba_n_groups": 1, **raw}, "mamba_n_groups"),
        state_size=fields.integer({"mamba_d_state": 256, **raw}, "mamba_d_state"),
        conv_kernel_size=fields.integer({"mamba_d_conv": 4, **raw}, "mamba_d_conv"),
        time_step_limit=(_bound(low), _bound(high)),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        bias=bool(raw.get("mamba_proj_bias", False)),
    )


def _bound(value: Any) -> float:
    """Read a bound; v5 writes infinity as an object, since JSON has no number for it."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _ffn(raw: RawConfig) -> MlpConfig | MoeConfig:
    shared = replace(fields.silu_mlp(raw, "shared_intermediate_size"), layout=MlpLayout.GRANITE)
    if not raw.get("num_local_experts", 8):
        return shared
    return MoeConfig(
        num_experts=fields.integer({"num_local_experts": 8, **raw}, "num_local_experts"),
        num_experts_per_tok=fields.integer(
            {"num_experts_per_tok": 2, **raw}, "num_experts_per_tok"
        ),
        expert=fields.silu_mlp(raw),
        norm_topk_prob=True,
        layout=ExpertLayout.GRANITE,
        shared_expert=shared,
    )
