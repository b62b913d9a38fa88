"""Describe `gemma2` and `gemma3_text`.

They have sandwich norms whose weights are offsets from one, scaled embeddings, GeGLU, their own
scale of scores, and windowed layers between full ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from session_server.models import fields
from session_server.models.config import (
    AttentionConfig,
    GateConfig,
    GateKind,
    MlpConfig,
    ModelConfig,
    NormConfig,
    NormPlacement,
    QkNorm,
    RopeConfig,
)
from session_server.models.fields import RawConfig


def gemma2(raw: RawConfig) -> ModelConfig:
    """Describe Gemma 2 (2024): soft-capped scores and logits; every second layer is full."""
    softcap = _softcap(raw, "attn_logit_softcapping")
    mixer = replace(_mixer(raw, fields.one_rope(raw)), attn_logit_softcapping=softcap)
    return _gemma(raw, (mixer, mixer), lambda index: index % 2 == 0)


def gemma3(raw: RawConfig) -> ModelConfig:
    """Describe Gemma 3 (2025): QK-norm, a rotary base per layer type; every sixth layer is full."""
    fields.require_supported(raw, "attn_logit_softcapping")
    theta = float(raw.get("rope_theta") or 1_000_000.0)
    local_theta = float(raw.get("rope_local_base_freq") or 10_000.0)
    ropes = fields.two_ropes(raw, full=theta, window=local_theta)
    full, windowed = (replace(_mixer(raw, rope), qk_norm=QkNorm.HEAD) for rope in ropes)
    period = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    return _gemma(raw, (full, windowed), lambda index: (index + 1) % period != 0)


def _gemma(
    raw: RawConfig,
    mixers: tuple[AttentionConfig, AttentionConfig],
    is_windowed: Callable[[int], bool],
) -> ModelConfig:
    """Describe what both have in common; `mixers` are those of full and of windowed layers."""
    fields.require_supported(raw, "use_bidirectional_attention", False)
    fields.require_supported(raw, "hidden_activation", "gelu_pytorch_tanh")
    gate = GateConfig(GateKind.GELU_TANH)
    ffn = MlpConfig(fields.integer(raw, "intermediate_size"), gate=gate)
    windows = fields.layer_windows(raw, fields.integer(raw, "sliding_window"), is_windowed)
    layers = fields.windowed_layers(*mixers, ffn, windows)
    norm = NormConfig(float(raw.get("rms_norm_eps", 1e-6)), NormPlacement.SANDWICH, adds_one=True)
    return replace(
        fields.model(raw, layers, norm, tied=True),
        embedding_multiplier=math.sqrt(fields.integer(raw, "hidden_size")),
        final_logit_softcapping=_softcap(raw, "final_logit_softcapping"),
    )


def _mixer(raw: RawConfig, rope: RopeConfig) -> AttentionConfig:
    scale = 1.0 / math.sqrt(float(raw.get("query_pre_attn_scalar", 256)))
    return replace(fields.biased_attention(raw, rope, head_dim=256), scale=scale)


def _softcap(raw: RawConfig, key: str) -> float | None:
    value = raw.get(key)
    return None if value is None else float(value)
