"""Random tiny checkpoints as `transformers` writes them, and its answer to a token sequence.

The reference is a full-sequence forward without a cache: Hugging Face's own cached path is not
above suspicion. Every parameter is random, norms and biases too: at their usual start values
(ones, zeros) a forgotten one would go unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache.types import Tokens

FAMILIES: Final = ("llama", "qwen2", "qwen3", "mistral")
"""Layers of full attention and one dense feed-forward."""

LAYERED_FAMILIES: Final = (
    "mistral_window",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "lfm2",
    "granitemoehybrid",
    "qwen3_5_text",
)
"""Families with layers of several kinds: windows, experts, latents, states, norms elsewhere."""

RECURRENT_FAMILIES: Final = ("lfm2", "granitemoehybrid", "qwen3_5_text")
"""Those of them that keep states."""

WINDOW: Final = 16

FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of four-bit numbers with two bits of exponent and one of mantissa."""
VOCAB_SIZE: Final = 131
WEIGHT_STD: Final = 0.12

_SHAPE: Final[Mapping[str, Any]] = MappingProxyType(
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

_FAMILY: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
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


def write_checkpoint(
    family: str,
    directory: Path,
    *,
    std: float = WEIGHT_STD,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of one family.

    Args:
        family: one of `FAMILIES` or `LAYERED_FAMILIES`.
        directory: made if need be.
        std: of the weights; 0.02, the usual one, hides mistakes.
        max_shard_size: of one file.
        overrides: fields of the Hugging Face configuration.
    """
    settings = {**_SHAPE, "model_type": family, **_FAMILY[family], **overrides}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                # Gemma stores how far its gains are from one.
                adds_one = family.startswith("gemma") or (
                    family == "qwen3_5_text" and "linear_attn" not in name
                )
                parameter.copy_(0.3 * noise + (0 if adds_one else 1))
            elif name.endswith("sinks"):
                parameter.copy_(noise)
            else:
                parameter.copy_(std * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def to_v4_style(directory: Path) -> None:
    """Rewrite `config.json` the way hub checkpoints of `transformers` 4 spell it."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["torch_dtype"] = raw.pop("dtype")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    path.write_text(json.dumps(raw))


def to_mxfp4(directory: Path) -> None:
    """Quantise the experts of a gpt-oss checkpoint the way OpenAI's own ones are stored."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        # From [experts, inputs, outputs] to rows of 32 inputs that share a scale.
        rows = tensors.pop(name).transpose(1, 2).unflatten(2, (-1, 32))
        scales = rows.abs().amax(-1, keepdim=True).log2().floor() - 2
        distances = ((rows / scales.exp2()).abs().unsqueeze(-1) - torch.tensor(FP4)).abs()
        codes = distances.argmin(-1) + 8 * (rows < 0)
        tensors[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = (scales.squeeze(-1) + 127).to(torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}
    (directory / "config.json").write_text(json.dumps(raw))


def reference_logits(directory: Path, tokens: Tokens | Sequence[int]) -> Tensor:
    """What `transformers` computes for a whole sequence: float32 [length, vocab], to be read only.

    Exact runs of one family reach the same few sequences on every page size and chunk size, so
    what was computed once is kept.
    """
    return _reference_logits(directory, tuple(int(token) for token in tokens))


@lru_cache(maxsize=4096)
def _reference_logits(directory: Path, tokens: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = _reference_model(directory)(
            input_ids=torch.tensor([tokens]), use_cache=False
        ).logits[0]
    return logits


@lru_cache(maxsize=32)
def _reference_model(directory: Path) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
