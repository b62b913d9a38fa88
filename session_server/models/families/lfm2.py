"""Describe `lfm2`: short convolutions between layers of attention."""

from __future__ import annotations

from dataclasses import replace

from session_server.models import fields
from session_server.models.config import (
    LayerConfig,
    MixerConfig,
    MlpConfig,
    MlpLayout,
    ModelConfig,
    NormConfig,
    QkNorm,
    ShortConvConfig,
    Spelling,
)
from session_server.models.fields import RawConfig

_SPELLING = Spelling(
    norms=("operator_norm", None, "ffn_norm", None),
    final_norm="embedding_norm",
    attention_output="out_proj",
    qk_norm="{}_layernorm",
    ffn="feed_forward.",
)


def lfm2(raw: RawConfig) -> ModelConfig:
    """Describe LFM2 (Liquid AI 2025): QK-norm by head; the size of the feed-forward is computed."""
    rope = fields.one_rope({"rope_theta": 1_000_000.0, **raw})
    full = replace(fields.attention(raw, rope), qk_norm=QkNorm.HEAD)
    conv = ShortConvConfig(
        fields.integer(raw, "hidden_size"),
        fields.integer(raw, "conv_L_cache"),
        bool(raw.get("conv_bias", False)),
    )
    mixers: dict[str, MixerConfig] = {"full_attention": full, "conv": conv}
    ffn = MlpConfig(_ffn_size(raw), layout=MlpLayout.LFM2)
    layers = (
        LayerConfig(mixers[name], ffn) for name in fields.layer_types(raw, _v4_types(raw), mixers)
    )
    tied = bool(raw.get("tie_embedding", True))
    norm = NormConfig(float(raw.get("norm_eps", 1e-5)))
    return replace(fields.model(raw, layers, norm, tied=tied), spelling=_SPELLING)


def _v4_types(raw: RawConfig) -> list[str]:
    full = raw.get("full_attn_idxs")
    indices = range(fields.integer(raw, "num_hidden_layers"))
    return ["full_attention" if full is None or i in full else "conv" for i in indices]


def _ffn_size(raw: RawConfig) -> int:
    """Return two thirds of the configured size, times a factor, rounded up to a multiple."""
    size = fields.integer(raw, "block_ff_dim" if "block_ff_dim" in raw else "intermediate_size")
    if not raw.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor = raw.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = fields.integer({"block_multiple_of": 256, **raw}, "block_multiple_of")
    return -(-int(factor * size) // multiple) * multiple
