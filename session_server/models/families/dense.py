"""Describe pre-norm models of GQA and SwiGLU: `llama`, `mistral`, `qwen2`, `qwen3`."""

from __future__ import annotations

from dataclasses import replace

from session_server.models import fields
from session_server.models.config import AttentionConfig, LayerConfig, ModelConfig, QkNorm
from session_server.models.fields import RawConfig


def llama(raw: RawConfig) -> ModelConfig:
    """Describe Llama 1 to 3 (Touvron et al. 2023): full attention."""
    mixer = fields.biased_attention(raw, fields.one_rope(raw))
    ffn = replace(fields.silu_mlp(raw), bias=bool(raw.get("mlp_bias", False)))
    layers = (LayerConfig(mixer, ffn),) * fields.integer(raw, "num_hidden_layers")
    return fields.model(raw, layers, fields.norm(raw))


def mistral(raw: RawConfig) -> ModelConfig:
    """Describe Mistral (Jiang et al. 2023): all layers have the window, or none."""
    fields.require_supported(raw, "layer_types")
    window = raw.get("sliding_window", 4096)
    return _windowed(raw, _mixer(raw), fields.layer_windows(raw, window, lambda _: True))


def qwen2(raw: RawConfig) -> ModelConfig:
    """Describe Qwen 2 and 2.5: biases on Q, K and V."""
    return _windowed(raw, replace(_mixer(raw), qkv_bias=True), _qwen_windows(raw))


def qwen3(raw: RawConfig) -> ModelConfig:
    """Describe Qwen 3: QK-norm by head."""
    return _windowed(raw, qwen3_mixer(raw), _qwen_windows(raw))


def qwen3_mixer(raw: RawConfig) -> AttentionConfig:
    """Describe the attention of Qwen 3, dense or with experts."""
    return replace(fields.biased_attention(raw, fields.one_rope(raw)), qk_norm=QkNorm.HEAD)


def qwen_window(raw: RawConfig) -> int | None:
    """Return the sliding window of a Qwen model, None if it is switched off."""
    window: int | None = raw.get("sliding_window")
    return window if raw.get("use_sliding_window", False) else None


def _mixer(raw: RawConfig) -> AttentionConfig:
    return fields.attention(raw, fields.one_rope(raw))


def _qwen_windows(raw: RawConfig) -> list[int | None]:
    """Return the window of every layer; layers below `max_window_layers` have none."""
    window = qwen_window(raw)
    first = raw.get("max_window_layers", 28)
    return fields.layer_windows(raw, window, lambda index: window is not None and index >= first)


def _windowed(raw: RawConfig, mixer: AttentionConfig, windows: list[int | None]) -> ModelConfig:
    layers = fields.windowed_layers(mixer, mixer, fields.silu_mlp(raw), windows)
    return fields.model(raw, layers, fields.norm(raw))
