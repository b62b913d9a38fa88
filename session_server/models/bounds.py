"""Check the fields of a `config.json` before any of them sizes something.

An untrusted configuration may ask for a million layers or a rotary base that is not a number. Every
field that a family reads is listed here by kind, and numbers have a range; a test keeps the lists
complete. The ranges allow models several times as large as those that exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

from session_server.models.config import LayerConfig, ModelConfig, MoeConfig
from session_server.models.errors import CheckpointError, shortened

MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1 << 12
MAX_HEAD_DIM: Final = 1 << 12
MAX_SIZE: Final = 1 << 20
"""Elements of a hidden state, a feed-forward or a latent."""

MAX_CONTEXT_LEN: Final = 1 << 24
MAX_VOCAB_SIZE: Final = 1 << 22
MAX_EXPERTS: Final = 1 << 13
MAX_EXPERTS_IN_ALL: Final = 1 << 17
"""Experts of all layers: each has tensors of its own, by name."""

MAX_CONV_WIDTH: Final = 16
"""Tokens that a convolution reads; the kernels have memory for as many."""

Range = tuple[float, float]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _same_range(bounds: Range, names: str) -> dict[str, Range]:
    return dict.fromkeys(names.split(), bounds)


INTEGERS: Final[Mapping[str, Range]] = (
    _same_range(
        (0, MAX_LAYERS),
        "num_hidden_layers first_k_dense_replace max_window_layers num_nextn_predict_layers "
        "num_mtp_layers",
    )
    | _same_range(
        (1, MAX_LAYERS),
        "full_attention_interval sliding_window_pattern _sliding_window_pattern "
        "decoder_sparse_step",
    )
    | _same_range(
        (0, MAX_SIZE),
        "hidden_size intermediate_size moe_intermediate_size shared_intermediate_size "
        "block_ff_dim block_multiple_of kv_lora_rank q_lora_rank",
    )
    | _same_range(
        (0, MAX_HEADS),
        "num_attention_heads num_key_value_heads linear_num_key_heads linear_num_value_heads "
        "mamba_n_heads mamba_n_groups",
    )
    | _same_range(
        (0, MAX_HEAD_DIM),
        "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim "
        "linear_value_head_dim mamba_d_state mamba_d_head",
    )
    | _same_range((0, MAX_CONTEXT_LEN), "max_position_embeddings original_max_position_embeddings")
    | _same_range((1, MAX_CONTEXT_LEN), "sliding_window")
    | _same_range((0, MAX_VOCAB_SIZE), "vocab_size")
    | _same_range(
        (0, MAX_EXPERTS),
        "n_routed_experts num_experts num_local_experts num_experts_per_tok n_shared_experts "
        "n_group topk_group",
    )
    | _same_range((0, MAX_CONV_WIDTH), "conv_L_cache mamba_d_conv linear_conv_kernel_dim")
)
"""Range of each integer field, both ends included. Required positive integers are also checked when
`fields.integer` reads them."""

NUMBERS: Final[Mapping[str, Range]] = (
    _same_range((1.0, 1e15), "rope_theta rope_local_base_freq")
    | _same_range((1e-3, 1e6), "factor low_freq_factor high_freq_factor beta_fast beta_slow")
    | _same_range((0.0, 1e6), "attention_factor mscale mscale_all_dim swiglu_alpha swiglu_limit")
    | _same_range((0.0, 1.0), "rms_norm_eps norm_eps partial_rotary_factor")
    | _same_range(
        (1e-6, 1e6),
        "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping "
        "block_ffn_dim_multiplier mamba_expand",
    )
    | _same_range(
        (0.0, 1e6),
        "routed_scaling_factor residual_multiplier embedding_multiplier logits_scaling "
        "attention_multiplier",
    )
)
"""Range of each numeric field, both ends included."""

FLAGS: Final = _names(
    "attention_bias mlp_bias norm_topk_prob tie_word_embeddings tie_embedding use_sliding_window "
    "truncate conv_bias block_auto_adjust_ff_dim mamba_conv_bias mamba_proj_bias "
    "use_bidirectional_attention rope_interleave"
)
"""Fields that are true or false."""

WORDS: Final = _names(
    "model_type dtype torch_dtype hidden_act hidden_activation rope_type type topk_method "
    "scoring_func position_embedding_type quant_method"
)
"""Fields that are strings."""

LISTS: Final = _names(
    "layer_types full_attn_idxs mlp_only_layers time_step_limit weight_block_size"
)
"""Fields that are lists of at most MAX_LAYERS entries."""

OBJECTS: Final = _names(
    "rope_parameters rope_scaling quantization_config full_attention sliding_attention"
)
"""Fields that are objects, whose own fields are listed here too."""


def check_fields(raw: Mapping[str, Any]) -> None:
    """Check every field that a family may read; families report the fields they miss.

    Raises:
        CheckpointError: a field has the wrong type or is out of range.
    """
    for name, value in raw.items():
        if value is None or (name == "mamba_d_head" and value == "auto"):
            continue
        if name in INTEGERS:
            _check_number(name, value, INTEGERS[name], kinds=(int,))
        elif name in NUMBERS:
            _check_number(name, value, NUMBERS[name], kinds=(int, float))
        elif name in FLAGS and not isinstance(value, bool):
            raise _invalid_field(name, "true or false", value)
        elif name in WORDS and not isinstance(value, str):
            raise _invalid_field(name, "a string", value)
        elif name in LISTS and not (isinstance(value, list) and len(value) <= MAX_LAYERS):
            raise _invalid_field(name, f"a list of at most {MAX_LAYERS} entries", value)
        elif name in OBJECTS:
            if not isinstance(value, dict):
                raise _invalid_field(name, "an object", value)
            check_fields(value)


def check_sizes(config: ModelConfig) -> None:
    """Check the sizes that were computed from the fields.

    Raises:
        CheckpointError: a size is zero or too large, or the model has too many experts.
    """
    _check_number(
        "the context length", config.max_position_embeddings, (1, MAX_CONTEXT_LEN), kinds=(int,)
    )
    for layer in set(config.layers):
        rotated = layer.mixer.rotary_dim if layer.mixer.rope is not None else 2
        if rotated % 2 != 0 or rotated < 2:
            raise CheckpointError(f"config.json: {rotated} rotated elements of a head are not even")
        for part in _components(layer):
            name = type(part).__name__.removesuffix("Config")
            for field in fields(part):
                value = getattr(part, field.name)
                if type(value) is int:
                    _check_number(f"{field.name} of {name}", value, (1, MAX_SIZE), kinds=(int,))
        if isinstance(layer.ffn, MoeConfig):
            _check_experts(layer.ffn)
    mixtures = (layer.ffn for layer in config.layers if isinstance(layer.ffn, MoeConfig))
    num_experts = sum(moe.num_experts for moe in mixtures)
    if num_experts > MAX_EXPERTS_IN_ALL:
        raise CheckpointError(
            f"config.json: {num_experts:,} experts in all layers, more than {MAX_EXPERTS_IN_ALL:,}"
        )


def _check_number(name: str, value: object, bounds: Range, *, kinds: tuple[type, ...]) -> None:
    low, high = bounds
    kind = "an integer" if kinds == (int,) else "a number"
    # Compares the exact type: `True` is an integer in Python.
    is_within = type(value) in kinds and low <= value <= high  # type: ignore[operator]
    if not is_within:
        raise _invalid_field(name, f"{kind} from {low:g} to {high:.10g}", value)


def _check_experts(ffn: MoeConfig) -> None:
    routing = ffn.routing
    if ffn.num_experts_per_tok > ffn.num_experts or routing.topk_group > routing.n_group:
        raise CheckpointError(
            f"config.json: {ffn.num_experts_per_tok} of {ffn.num_experts} experts from "
            f"{routing.topk_group} of {routing.n_group} groups cannot be chosen"
        )


def _invalid_field(name: str, what: str, value: object) -> CheckpointError:
    return CheckpointError(f"config.json: {name} must be {what}, it is {shortened(repr(value))}")


def _components(layer: LayerConfig) -> Iterable[Any]:
    """Yield the configs of which a layer is composed."""
    yield layer.mixer
    yield layer.ffn
    if isinstance(layer.ffn, MoeConfig):
        yield layer.ffn.expert
        yield layer.ffn.routing
        if layer.ffn.shared_expert is not None:
            yield layer.ffn.shared_expert
