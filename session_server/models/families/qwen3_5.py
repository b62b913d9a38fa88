"""Describe `qwen3_5_text`: gated delta rules between layers of gated attention."""

from __future__ import annotations

from dataclasses import replace

from session_server.models import fields
from session_server.models.config import (
    AttentionConfig,
    GatedDeltaConfig,
    LayerConfig,
    MixerConfig,
    ModelConfig,
    QkNorm,
)
from session_server.models.errors import UnsupportedModel
from session_server.models.fields import RawConfig


def qwen3_5(raw: RawConfig) -> ModelConfig:
    """Describe the text model of Qwen 3.5.

    Heads are rotated in part, norm weights are offsets from one, every fourth layer is attention.
    """
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    part = settings.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
    raw = {**raw, "rope_parameters": settings, "partial_rotary_factor": None}
    mixers: dict[str, MixerConfig] = {
        "linear_attention": _delta(raw),
        "full_attention": _attention(raw, float(part)),
    }
    period = fields.integer({"full_attention_interval": 4, **raw}, "full_attention_interval")
    default_types = [
        "linear_attention" if (index + 1) % period else "full_attention"
        for index in range(fields.integer(raw, "num_hidden_layers"))
    ]
    ffn = fields.silu_mlp(raw)
    layers = (
        LayerConfig(mixers[name], ffn) for name in fields.layer_types(raw, default_types, mixers)
    )
    return fields.model(raw, layers, replace(fields.norm(raw), adds_one=True))


def _attention(raw: RawConfig, part: float) -> AttentionConfig:
    rope = fields.one_rope(raw)
    mixer = fields.biased_attention(raw, rope, head_dim=256)
    rope = replace(rope, rotary_dim=int(mixer.head_dim * part))
    return replace(mixer, rope=rope, qk_norm=QkNorm.HEAD, is_gated=True)


def _delta(raw: RawConfig) -> GatedDeltaConfig:
    usual = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    sizes = [fields.integer({**usual, **raw}, key) for key in usual]
    if sizes[1] % sizes[0]:
        raise UnsupportedModel(f"{sizes[1]} value heads do not divide over {sizes[0]} key heads")
    return GatedDeltaConfig(*sizes)
