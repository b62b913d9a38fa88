"""Read the `config.json` fields that all families have in common.

Both spellings are read: v4 (`rope_theta`, `rope_scaling`), which hub checkpoints carry, and v5
(`rope_parameters`, `layer_types`), which `save_pretrained` writes today.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from session_server.models.config import (
    DTYPE_BYTES,
    STATE_POOL,
    AttentionConfig,
    DTypeName,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
    RopeKind,
)
from session_server.models.errors import CheckpointError, UnsupportedModel, shortened

RawConfig = Mapping[str, Any]

_WINDOWED: Final = {"sliding_attention": True, "full_attention": False}


def integer(raw: RawConfig, key: str) -> int:
    """Return a positive integer field.

    Raises:
        CheckpointError: it is missing or not a positive integer.
    """
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json: {key} must be a positive integer, it is {shortened(repr(value))}"
        )
    return value


def dtype_name(raw: RawConfig) -> DTypeName:
    """Return the dtype the weights were saved in; float32 if it is not a known one."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in DTYPE_BYTES else "float32"


def require_supported(raw: RawConfig, key: str, *known: object) -> None:
    """Reject a value that is not implemented.

    Raises:
        UnsupportedModel: `key` is present and its value is not one of `known`.
    """
    value = raw.get(key)
    if value is not None and value not in known:
        meant = f"; known: {', '.join(map(str, known))}" if known else ""
        raise UnsupportedModel(f"{key} {value!r} is not implemented{meant}")


def attention(raw: RawConfig, rope: RopeConfig, *, head_dim: int | None = None) -> AttentionConfig:
    """Build an attention config from head counts and sizes; families set the rest.

    `head_dim`: used if `raw` has none; None means hidden size over heads.
    """
    num_heads = integer(raw, "num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    head_dim = raw.get("head_dim") or head_dim or integer(raw, "hidden_size") // num_heads
    if num_heads % num_kv_heads != 0:
        raise UnsupportedModel(
            f"{num_heads} attention heads do not divide over {num_kv_heads} key-value heads"
        )
    if head_dim % 2 != 0 or head_dim < 2:
        raise UnsupportedModel(f"head_dim {head_dim} is not even, as rotary embeddings need it")
    return AttentionConfig(num_heads, num_kv_heads, head_dim, 1.0 / math.sqrt(head_dim), rope)


def biased_attention(
    raw: RawConfig, rope: RopeConfig, *, head_dim: int | None = None
) -> AttentionConfig:
    """Build an attention config whose projections have biases if `attention_bias` says so."""
    bias = bool(raw.get("attention_bias", False))
    return replace(attention(raw, rope, head_dim=head_dim), qkv_bias=bias, output_bias=bias)


def norm(raw: RawConfig, eps: float = 1e-6) -> NormConfig:
    """Place norms before mixer and ffn; `eps` is used if `raw` has no `rms_norm_eps`."""
    return NormConfig(float(raw.get("rms_norm_eps", eps)))


def silu_mlp(raw: RawConfig, size_key: str = "intermediate_size") -> MlpConfig:
    """Build the SwiGLU feed-forward that most families have."""
    require_supported(raw, "hidden_act", "silu", "swish")
    return MlpConfig(integer(raw, size_key))


def layer_windows(
    raw: RawConfig, window: int | None, is_windowed: Callable[[int], bool]
) -> list[int | None]:
    """Return the sliding window of every layer, None for full attention.

    A window as long as the context counts as none. `is_windowed`: whether a layer, counted from 0,
    has a window if `layer_types` (v5) is absent.
    """
    indices = range(integer(raw, "num_hidden_layers"))
    default_types = ["sliding_attention" if is_windowed(i) else "full_attention" for i in indices]
    types = layer_types(raw, default_types, _WINDOWED)
    if window is not None and window >= context_len(raw):
        window = None
    return [window if _WINDOWED[name] else None for name in types]


def windowed_layers(
    full: AttentionConfig,
    windowed: AttentionConfig,
    ffn: MlpConfig | MoeConfig,
    windows: Iterable[int | None],
) -> list[LayerConfig]:
    """Build layers that share one ffn and attend like `full`, or like `windowed` with a window."""
    return [
        LayerConfig(full if window is None else replace(windowed, sliding_window=window), ffn)
        for window in windows
    ]


def layer_types(raw: RawConfig, default_types: list[str], known: Iterable[str]) -> list[str]:
    """Return the type of every layer (v5), or `default_types`; all must be `known`."""
    types = raw.get("layer_types") or default_types
    if len(types) != len(default_types):
        raise CheckpointError(
            f"config.json: {len(default_types)} layers, and {len(types)} layer_types"
        )
    names = tuple(known)
    unknown = sorted({str(name) for name in types} - set(names))
    if unknown:
        raise UnsupportedModel(
            f"layer_types {shortened(', '.join(unknown))}: not implemented; "
            f"known: {', '.join(names)}"
        )
    return list(types)


def rope_config(raw: RawConfig, settings: RawConfig, *, theta: float = 10_000.0) -> RopeConfig:
    """Build the rotary settings of some layers; `theta` is used if `settings` has none.

    `settings`: `rope_parameters` or `rope_scaling`, or the part of it for these layers.
    """
    theta = float(settings.get("rope_theta") or theta)
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
        or integer(raw, "max_position_embeddings")
    )
    factor = settings.get("factor")
    if factor is None and kind is RopeKind.YARN:
        factor = integer(raw, "max_position_embeddings") / original_len
    if factor is None:
        raise CheckpointError(f"rope scaling {name!r} lacks its field 'factor'")
    if kind is RopeKind.YARN and theta <= 1.0:
        raise UnsupportedModel(f"rope scaling {name!r} needs a rope_theta above 1, it is {theta:g}")
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


def one_rope(raw: RawConfig) -> RopeConfig:
    """Build the rotary settings of a model whose layers all share them."""
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return rope_config(raw, settings, theta=float(raw.get("rope_theta") or 10_000.0))


def two_ropes(raw: RawConfig, *, full: float, window: float) -> tuple[RopeConfig, RopeConfig]:
    """Build the rotary settings of full and of windowed layers.

    v4 scales full layers only; v5 has settings per layer type. `full` and `window` are the thetas
    of the two if v5 settings do not give them.
    """
    by_type = raw.get("rope_parameters") or {}
    if not by_type.keys() & _WINDOWED.keys():
        scaling = raw.get("rope_scaling") or by_type
        local = {"rope_theta": scaling["rope_theta"]} if "rope_theta" in scaling else {}
        by_type = {"full_attention": scaling, "sliding_attention": local}
    of_full = rope_config(raw, by_type.get("full_attention") or {}, theta=full)
    return of_full, rope_config(raw, by_type.get("sliding_attention") or {}, theta=window)


def context_len(raw: RawConfig) -> int:
    """Return the number of positions the model can address."""
    length = integer(raw, "max_position_embeddings")
    settings = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = rope_config(raw, settings.get("full_attention") or settings)
    if rope.rope_type is RopeKind.YARN:
        # Qwen's configs with YaRN keep max_position_embeddings at the trained length.
        return max(length, int(rope.factor * rope.original_max_position_embeddings))
    return length


def model(
    raw: RawConfig, layers: Iterable[LayerConfig], norm: NormConfig, *, tied: bool = False
) -> ModelConfig:
    """Assemble the model config; `tied`: embedding and LM head are, if `raw` does not say.

    Raises:
        UnsupportedModel: no layer is an attention layer.
    """
    described = tuple(layers)
    if all(layer.mixer.pool == STATE_POOL for layer in described):
        raise UnsupportedModel("a model without a layer of attention is not implemented")
    return ModelConfig(
        model_type=str(raw["model_type"]),
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        layers=described,
        norm=norm,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", tied)),
        max_position_embeddings=context_len(raw),
        dtype=dtype_name(raw),
    )


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return the factor by which a context scaled by `factor` sharpens attention."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(settings: RawConfig, factor: float) -> float:
    """Return YaRN's temperature (Peng et al. 2023, eq. 22), including DeepSeek's `mscale` form."""

    given = settings.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_magnitude(factor, float(mscale)) / yarn_magnitude(factor, float(mscale_all))
    return yarn_magnitude(factor, 1.0)


def _number(settings: RawConfig, key: str) -> float:
    value = settings.get(key)
    if not isinstance(value, int | float):
        raise CheckpointError(f"config.json: rope scaling needs a number {key}, it is {value!r}")
    return float(value)
