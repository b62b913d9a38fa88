"""Small configurations of every family, as fields of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

WINDOW: Final = 16

VOCAB_SIZE: Final = 131

SHAPE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
)
_ONE_ATTENDS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
        ],
    }
)
_DEEPSEEK: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "num_key_value_heads": 6,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.6,
            "rope_theta": 500.0,
        },
    }
)
"""At these sizes, ten new tokens of a row are absorbed and eleven expanded."""

FAMILY_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
        "mistral": {"head_dim": 12, "sliding_window": None},
        # Caps, limits and bases at which they make a difference on tiny random weights.
        "mistral_window": {"model_type": "mistral", "sliding_window": WINDOW},
        "gemma2": {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
        },
        "gemma3_text": {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        "olmo3": {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                    "attention_factor": 1.2,
                    "rope_theta": 500.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        "gpt_oss": {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "truncate": False,
                "rope_theta": 500.0,
            },
        },
        "qwen3_moe": {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        "deepseek_v2_lite": {
            **_DEEPSEEK,
            "model_type": "deepseek_v2",
            "q_lora_rank": None,
            "topk_method": "greedy",
            "attention_bias": True,
        },
        "deepseek_v2": {
            **_DEEPSEEK,
            "q_lora_rank": 14,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
        "deepseek_v3": {
            **_DEEPSEEK,
            "q_lora_rank": 14,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
        },
        "lfm2": {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 0.9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        # Decays by which a state forgets within tens of tokens, and not within one.
        "granitemoehybrid": {
            **_ONE_ATTENDS,
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
        },
        "qwen3_5_text": {
            **_ONE_ATTENDS,
            "head_dim": 16,
            "attention_bias": True,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 10,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        },
    }
)

RAW_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {family: {"model_type": family, **SHAPE, **fields} for family, fields in FAMILY_FIELDS.items()}
)
