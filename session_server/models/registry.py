"""From a Hugging Face `config.json` to a `ModelConfig`, per `model_type`.

Both spellings are read: v4 (`rope_theta`, `rope_scaling`), which hub checkpoints carry, and v5
(`rope_parameters`), which `save_pretrained` writes today. A setting that is not implemented is
refused by name; silence would mean wrong answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from session_server.models.config import (
    DTYPE_BYTES,
    AttentionConfig,
    DTypeName,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    RopeConfig,
    RopeKind,
)
from session_server.models.errors import CheckpointError, UnsupportedModel

RawConfig = Mapping[str, Any]


def load_config(directory: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint.

    Raises:
        CheckpointError: the file is missing, is not JSON or lacks a field.
        UnsupportedModel: the model type, or a setting of it, is not implemented.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no config.json: is it a checkpoint?") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    try:
        return parse_config(raw)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: a field has the wrong type: {error}") from None


def parse_config(raw: RawConfig) -> ModelConfig:
    """Turn the contents of a `config.json` into a `ModelConfig`.

    Raises:
        CheckpointError: a field is missing or has the wrong type.
        UnsupportedModel: the model type, or a setting of it, is not implemented.
    """
    model_type = raw.get("model_type")
    describe = MIXERS.get(model_type) if isinstance(model_type, str) else None
    if describe is None:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not implemented; known: {', '.join(sorted(MIXERS))}"
        )
    if "quantization_config" in raw:
        raise UnsupportedModel("quantization_config: quantised checkpoints are not implemented")
    activation = raw.get("hidden_act", "silu")
    if activation not in {"silu", "swish"}:
        raise UnsupportedModel(f"hidden_act {activation!r} is not implemented; known: silu")
    rope = _parse_rope(raw)
    context_len, warnings = _context_len(raw, rope)
    ffn = MlpConfig(_integer(raw, "intermediate_size"), bool(raw.get("mlp_bias", False)))
    layer = LayerConfig(describe(raw), ffn)
    return ModelConfig(
        model_type=str(model_type),
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=_integer(raw, "hidden_size"),
        layers=(layer,) * _integer(raw, "num_hidden_layers"),
        rope=rope,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_context_len=context_len,
        dtype=_dtype(raw),
        warnings=warnings,
    )


def _llama(raw: RawConfig) -> AttentionConfig:
    bias = bool(raw.get("attention_bias", False))
    return _attention(raw, qkv_bias=bias, output_bias=bias)


def _mistral(raw: RawConfig) -> AttentionConfig:
    return _attention(raw)


def _qwen2(raw: RawConfig) -> AttentionConfig:
    return _attention(raw, qkv_bias=True)


def _qwen3(raw: RawConfig) -> AttentionConfig:
    bias = bool(raw.get("attention_bias", False))
    return _attention(raw, qkv_bias=bias, output_bias=bias, qk_norm=True)


MIXERS: Final[Mapping[str, Callable[[RawConfig], AttentionConfig]]] = MappingProxyType(
    {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3}
)
"""The attention of every implemented `model_type`; the rest of the layer is the same."""


def _attention(
    raw: RawConfig, *, qkv_bias: bool = False, output_bias: bool = False, qk_norm: bool = False
) -> AttentionConfig:
    num_heads = _integer(raw, "num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    head_dim = raw.get("head_dim") or _integer(raw, "hidden_size") // num_heads
    if num_heads % num_kv_heads != 0:
        raise UnsupportedModel(
            f"{num_heads} attention heads do not divide over {num_kv_heads} key-value heads"
        )
    if head_dim % 2 != 0:
        raise UnsupportedModel(f"head_dim {head_dim} is odd, which rotary embeddings cannot be")
    return AttentionConfig(num_heads, num_kv_heads, head_dim, qkv_bias, output_bias, qk_norm)


def _parse_rope(raw: RawConfig) -> RopeConfig:
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(settings.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    name = settings.get("rope_type") or settings.get("type") or "default"
    partial = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in {None, 1}:
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not implemented")
    if name not in {kind.value for kind in RopeKind}:
        known = ", ".join(kind.value for kind in RopeKind)
        raise UnsupportedModel(f"rope scaling {name!r} is not implemented; known: {known}")
    kind = RopeKind(name)
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta)
    original_len = int(
        settings.get("original_max_position_embeddings")
        or raw.get("original_max_position_embeddings")
        or _integer(raw, "max_position_embeddings")
    )
    factor = settings.get("factor")
    if factor is None and kind is RopeKind.YARN:
        factor = _integer(raw, "max_position_embeddings") / original_len
    if factor is None:
        raise CheckpointError(f"rope scaling {name!r} lacks its field 'factor'")
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta, kind, float(factor))
    if kind is RopeKind.LLAMA3:
        low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
        return RopeConfig(theta, kind, float(factor), low, high, original_len)
    return RopeConfig(
        theta,
        kind,
        float(factor),
        float(settings.get("beta_slow") or 1.0),
        float(settings.get("beta_fast") or 32.0),
        original_len,
        _yarn_attention_factor(settings, float(factor)),
        bool(settings.get("truncate", True)),
    )


def _yarn_attention_factor(settings: RawConfig, factor: float) -> float:
    """The temperature of YaRN (Peng et al. 2023, eq. 22), DeepSeek's `mscale` form included."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = settings.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and mscale_all:
        return magnitude(float(mscale)) / magnitude(float(mscale_all))
    return magnitude(1.0)


def _context_len(raw: RawConfig, rope: RopeConfig) -> tuple[int, tuple[str, ...]]:
    """Positions the model can address, and what to warn about."""
    context_len = _integer(raw, "max_position_embeddings")
    if rope.kind is RopeKind.YARN:
        # Qwen's way to switch YaRN on leaves max_position_embeddings at the trained length.
        context_len = max(context_len, int(rope.factor * rope.original_context_len))
    window = raw.get("sliding_window")
    is_windowed = window is not None and raw.get("use_sliding_window", True)
    # Up to the window's length, windowed and full attention are the same function.
    if is_windowed and int(cast(int, window)) < context_len:
        warning = (
            f"context shortened from {context_len} to {window} tokens: this model attends to a "
            f"sliding window beyond that, which is not implemented"
        )
        return int(cast(int, window)), (warning,)
    return context_len, ()


def _dtype(raw: RawConfig) -> DTypeName:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in DTYPE_BYTES else "float32"


def _integer(raw: RawConfig, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, it is {value!r}")
    return value


def _number(settings: RawConfig, key: str) -> float:
    value = settings.get(key)
    if not isinstance(value, int | float):
        raise CheckpointError(f"config.json: rope scaling needs a number {key}, it is {value!r}")
    return float(value)
