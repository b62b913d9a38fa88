"""Describe `olmo3` (Ai2 2025).

Norms follow mixer and ffn, QK-norm spans whole projections, and three windowed layers precede each
full one.
"""

from __future__ import annotations

from dataclasses import replace

from session_server.models import fields
from session_server.models.config import (
    ModelConfig,
    NormConfig,
    NormPlacement,
    QkNorm,
)
from session_server.models.fields import RawConfig


def olmo3(raw: RawConfig) -> ModelConfig:
    """Describe OLMo 3: rotary scaling applies to full layers only."""
    theta = float(raw.get("rope_theta") or 500_000.0)
    ropes = fields.two_ropes(raw, full=theta, window=theta)
    bias = bool(raw.get("attention_bias", False))
    full, windowed = (
        replace(
            fields.attention(raw, rope),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=QkNorm.PROJECTION,
        )
        for rope in ropes
    )
    windows = fields.layer_windows(
        raw, fields.integer(raw, "sliding_window"), lambda index: (index + 1) % 4 != 0
    )
    layers = fields.windowed_layers(full, windowed, fields.silu_mlp(raw), windows)
    norm = NormConfig(float(raw.get("rms_norm_eps", 1e-5)), NormPlacement.POST)
    return fields.model(raw, layers, norm)
