"""Describe `olmo3` (Ai2 2025).

Norms follow mixer and ffn, QK-norm spans whole projections, and three windowed layers precede each
full one.
"""

from __future__ import annotations

from dataclasses import replace

from session_server.models import fields
from session_server.models.config import ModelConfig, NormPlacement, QkNorm
from session_server.models.fields import RawConfig


def olmo3(raw: RawConfig) -> ModelConfig:
    """Describe OLMo 3: rotary scaling applies to full layers only."""
    theta = float(raw.get("rope_theta") or 500_000.0)
    ropes = fields.two_ropes(raw, full=theta, window=theta)
    mixers = (fields.biased_attention(raw, rope) for rope in ropes)
    full, windowed = (replace(mixer, qk_norm=QkNorm.PROJECTION) for mixer in mixers)
    windows = fields.layer_windows(
        raw, fields.integer(raw, "sliding_window"), lambda index: (index + 1) % 4 != 0
    )
    layers = fields.windowed_layers(full, windowed, fields.silu_mlp(raw), windows)
    norm = replace(fields.norm(raw, 1e-5), placement=NormPlacement.POST)
    return fields.model(raw, layers, norm)
