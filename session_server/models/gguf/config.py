"""Turn the metadata of a GGUF file into the fields of a Hugging Face `config.json`.

Keys are those of llama.cpp (`gguf/constants.py`). What files leave out is what llama.cpp assumes,
per architecture (`src/models`).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from session_server.models.bounds import MAX_LAYERS
from session_server.models.config import AttentionConfig, ModelConfig
from session_server.models.errors import CheckpointError, UnsupportedModel, shortened
from session_server.models.fields import yarn_magnitude
from session_server.models.gguf.names import ROPE_FACTORS, SANDWICH_ARCHITECTURES
from session_server.models.gguf.reader import GgufFile, GgufTensor, read_range

Fields = dict[str, Any]

_SCALINGS: Final = ("none", "linear", "yarn")

_DEFAULT_FFN: Final = {"qwen3moe": 0}
"""Architectures that have no dense feed-forward."""


class Metadata:
    """Read the keys of a file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.word("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture; its lists have a number for each layer.

        Raises:
            CheckpointError: a list is longer than there may be layers.
        """
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list | array) and len(value) > MAX_LAYERS:
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} has {len(value):,} numbers, more "
                f"than {MAX_LAYERS} layers"
            )
        return value.tolist() if isinstance(value, array) else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number, the same for all layers that have it; without a default it must be set.

        Raises:
            CheckpointError: the key is missing.
            UnsupportedModel: layers have numbers of their own.
        """
        value = self.get(key, default)
        if isinstance(value, list):
            value = sorted(set(value) - {0})
            if len(value) != 1:
                raise UnsupportedModel(
                    f"{self.file.path}: {self.architecture}.{key} differs between layers, which "
                    "is not implemented"
                )
            value = value[0]
        if not isinstance(value, int | float):
            raise CheckpointError(
                f"{self.file.path}: the metadata lacks the number {self.architecture}.{key}; "
                "convert or download the file again"
            )
        return value

    def require_neutral(self, key: str, *neutral: float) -> None:
        """Reject a number that would change results and is not implemented.

        Raises:
            UnsupportedModel: the file has it, and it is not one of `neutral`.
        """
        value = self.number(key, neutral[0])
        if value not in neutral:
            raise UnsupportedModel(
                f"{self.file.path}: {self.architecture}.{key} {value} is not implemented"
            )

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor of that name."""
        return name in self.file.tensors


def raw_config(file: GgufFile) -> Fields:
    """Return the fields of a `config.json` for the model in a file.

    Raises:
        CheckpointError: a key is missing, or is not what it should be.
        UnsupportedModel: the architecture, or a setting of it, is not implemented.
    """
    metadata = Metadata(file)
    describe = ARCHITECTURES.get(metadata.architecture)
    if describe is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(
            f"{file.path}: the architecture {shortened(metadata.architecture)!r} is not "
            f"implemented for GGUF; known: {known}"
        )
    return _common(metadata) | describe(metadata)


def adapt(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Return the config of a file's tensors, which differ from Hugging Face's in two things.

    Gains of Gemma's norms are stored with the one added. Scaled frequencies of Llama 3.1 are
    stored as what to divide by, instead of the settings that these are computed from.
    """
    if file.metadata["general.architecture"] in SANDWICH_ARCHITECTURES:
        config = replace(config, norm=replace(config.norm, adds_one=False))
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return config
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} must be a vector of type F32")
    factors: tuple[float, ...] = ()
    layers = []
    for layer in config.layers:
        mixer = layer.mixer
        if not isinstance(mixer, AttentionConfig) or mixer.rope is None:
            raise UnsupportedModel(f"{file.path}: {ROPE_FACTORS} is not implemented here")
        if tensor.shape[0] != mixer.rotary_dim // 2:
            raise CheckpointError(
                f"{file.path}: {ROPE_FACTORS} has {tensor.shape[0]} factors for "
                f"{mixer.rotary_dim // 2} rotary pairs"
            )
        factors = factors or _rope_factors(file, tensor)
        rope = replace(mixer.rope, factors=factors)
        layers.append(replace(layer, mixer=replace(mixer, rope=rope)))
    return replace(config, layers=tuple(layers))


def head_counts(file: GgufFile) -> Mapping[str, int]:
    """Return the heads of the projections to Q and K, by the names of their tensors."""
    metadata = Metadata(file)
    num_heads = int(metadata.number("attention.head_count"))
    if metadata.get("attention.head_count_kv") is None:
        return {"attn_q": num_heads, "attn_k": num_heads}
    return {"attn_q": num_heads, "attn_k": int(metadata.number("attention.head_count_kv"))}


def _rope_factors(file: GgufFile, tensor: GgufTensor) -> tuple[float, ...]:
    content = read_range(file.path, tensor.start, tensor.num_bytes)
    factors: tuple[float, ...] = struct.unpack(f"<{tensor.shape[0]}f", content)
    if not all(1e-3 <= factor <= 1e6 for factor in factors):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} has a factor that is out of bounds")
    return factors


def _common(of: Metadata) -> Fields:
    """Return the fields that all architectures have, without those that are absent."""
    embedding = of.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{of.file.path} has no matrix token_embd.weight: is it a whole model?"
        )
    heads = head_counts(of.file)
    hidden_size = of.number("embedding_length")
    head_dim = hidden_size // max(1, heads["attn_q"])
    value_len = of.number("attention.value_length", head_dim)
    head_dim = of.number("attention.key_length", head_dim)
    if value_len != head_dim:
        raise UnsupportedModel(f"{of.file.path}: keys and values of different lengths")
    if of.get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{of.file.path}: heads that are rotated in part")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        of.require_neutral(f"{key}_swa", head_dim)
    fields = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": of.number("block_count"),
        "intermediate_size": of.number("feed_forward_length", _DEFAULT_FFN.get(of.architecture)),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "head_dim": head_dim,
        "rms_norm_eps": of.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": of.number("context_length"),
        "rope_theta": of.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(of),
        "tie_word_embeddings": not of.has_tensor("output.weight"),
        "dtype": {"F32": "float32", "BF16": "bfloat16"}.get(embedding.type.name, "float16"),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _rope_scaling(of: Metadata) -> Fields | None:
    """Return the scaling of frequencies, None for none: linear where the type is left out."""
    kind = of.get("rope.scaling.type", "linear")
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"{of.file.path}: rope scaling {shortened(str(kind))!r}")
    of.require_neutral("rope.scaling.alpha", 0.0)
    if kind == "yarn":
        return _yarn(of)
    of.require_neutral("rope.scaling.attn_factor", 1.0)
    factor = _scaling_factor(of)
    return None if kind == "none" or factor == 1 else {"rope_type": kind, "factor": factor}


def _scaling_factor(of: Metadata) -> float:
    """Return the factor under its name of today, else under the old one; 0 stands for none."""
    factor = of.number("rope.scaling.factor", of.number("rope.scale_linear", 1.0))
    return float(factor or 1.0)


def _yarn(of: Metadata) -> Fields:
    """Return YaRN's settings.

    `yarn_attn_factor` is Hugging Face's `attention_factor`, in place of a factor computed from the
    scaling; 1 is what llama.cpp writes when it saves any model, and stands for none.
    `attn_factor` multiplies either.
    """
    of.require_neutral("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    of.require_neutral("rope.scaling.yarn_log_multiplier", 0.0)
    if of.architecture == "gemma3":
        # It would multiply in layers with windows too, which are not scaled.
        of.require_neutral("rope.scaling.attn_factor", 1.0)
    factor = _scaling_factor(of)
    own = of.number("rope.scaling.yarn_attn_factor", 1.0)
    magnitude = yarn_magnitude(factor, 1.0) if own == 1 else own
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": of.get("rope.scaling.original_context_length"),
        "attention_factor": magnitude * of.number("rope.scaling.attn_factor", 1.0),
        "beta_fast": of.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": of.get("rope.scaling.yarn_beta_slow"),
    }
    return {name: value for name, value in scaling.items() if value is not None}


def _llama(of: Metadata) -> Fields:
    if of.get("expert_count", 0):
        raise UnsupportedModel(f"{of.file.path}: llama with experts (Mixtral) is not implemented")
    window = of.get("attention.sliding_window")
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    return {
        "model_type": "llama",
        "attention_bias": of.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": of.has_tensor("blk.0.ffn_gate.bias"),
    }


def _qwen2(_: Metadata) -> Fields:
    return {"model_type": "qwen2"}


def _qwen3(_: Metadata) -> Fields:
    return {"model_type": "qwen3"}


def _qwen3_moe(of: Metadata) -> Fields:
    num_chosen = of.number("expert_used_count")
    size = of.number("expert_feed_forward_length", 0)
    return {
        "model_type": "qwen3_moe",
        "num_experts": of.number("expert_count"),
        "num_experts_per_tok": num_chosen,
        "moe_intermediate_size": size or of.number("feed_forward_length") // max(1, num_chosen),
        "norm_topk_prob": bool(of.get("expert_weights_norm", True)),
    }


def _gemma(of: Metadata, largest: int) -> Fields:
    """`largest`: layers of the 27B model, the one whose scores are scaled by another size."""
    head_dim = of.number("embedding_length") // max(1, head_counts(of.file)["attn_q"])
    if of.number("block_count") != largest:
        head_dim = of.number("attention.key_length", head_dim)
    return {"query_pre_attn_scalar": head_dim}


def _layer_types(of: Metadata, period: int) -> list[str] | None:
    """Return which layers have a window: as listed, or all but each last of a period, 0 for all.

    `period`: where the file has neither. None: the number of layers is out of bounds.
    """
    pattern = of.get("attention.sliding_window_pattern", period)
    if not isinstance(pattern, list):
        num_layers = of.number("block_count")
        if type(pattern) is not int or pattern < 0:
            raise CheckpointError(
                f"{of.file.path}: {of.architecture}.attention.sliding_window_pattern is "
                f"{shortened(repr(pattern))}, and no period of layers"
            )
        if type(num_layers) is not int or not 0 <= num_layers <= MAX_LAYERS:
            return None
        pattern = [pattern == 0 or i % pattern < pattern - 1 for i in range(num_layers)]
    return ["sliding_attention" if is_windowed else "full_attention" for is_windowed in pattern]


def _gemma2(of: Metadata) -> Fields:
    of.require_neutral("rope.freq_base_swa", of.number("rope.freq_base", 10_000.0))
    fields = {
        "model_type": "gemma2",
        "attn_logit_softcapping": of.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": of.number("final_logit_softcapping", 30.0),
        "sliding_window": of.number("attention.sliding_window", 4096),
        "layer_types": _layer_types(of, 2),
    }
    return fields | _gemma(of, largest=46)


def _gemma3(of: Metadata) -> Fields:
    """A window of 0 stands for none, and so does a soft cap of 0."""
    window = of.number("attention.sliding_window", 0)
    fields = {
        "model_type": "gemma3_text",
        "rope_local_base_freq": of.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": of.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or of.number("context_length"),
        "layer_types": _layer_types(of, 6 if window else 1),
    }
    return fields | _gemma(of, largest=62)


def _lfm2(of: Metadata) -> Fields:
    """Layers without heads for K and V are convolutions."""
    num_kv_heads = of.get("attention.head_count_kv")
    if not isinstance(num_kv_heads, list):
        raise CheckpointError(
            f"{of.file.path}: the metadata lacks the list lfm2.attention.head_count_kv; convert or "
            "download the file again"
        )
    window = of.number("attention.sliding_window", 0)
    if 0 < window < of.number("context_length"):
        of.require_neutral("attention.sliding_window", 0)
    return {
        "model_type": "lfm2",
        "layer_types": ["full_attention" if num else "conv" for num in num_kv_heads],
        "conv_L_cache": of.number("shortconv.l_cache"),
        "norm_eps": of.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": not of.has_tensor("output.weight"),
    }


ARCHITECTURES: Final[Mapping[str, Callable[[Metadata], Fields]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "lfm2": _lfm2,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
}
"""What each architecture adds to the common fields."""
