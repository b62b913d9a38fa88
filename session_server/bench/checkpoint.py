"""Write a small random checkpoint with a long context, for workloads that measure only cost."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from session_server.demo import MODEL_DIR

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Describe the shape of a random Qwen3 model."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 256
    context_len: int = 16_384
    seed: int = 0


def write_random_checkpoint(directory: Path, shape: RandomModel) -> Path:
    """Write a Hugging Face checkpoint of random weights with the embedded tokenizer.

    The weights are float32, drawn with a standard deviation of 0.08. Returns `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        shutil.copy(MODEL_DIR / name, directory / name)
    vocab_size = json.loads((MODEL_DIR / "config.json").read_text())["vocab_size"]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "max_position_embeddings": shape.context_len,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    save_file(_random_weights(shape, vocab_size), directory / "model.safetensors")
    return directory


def _random_weights(shape: RandomModel, vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(shape.seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, 0.08, (rows, columns)).astype(np.float32)

    hidden, query = shape.hidden_size, shape.num_heads * shape.head_dim
    key = shape.num_kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "self_attn.q_proj.weight": matrix(query, hidden),
            prefix + "self_attn.k_proj.weight": matrix(key, hidden),
            prefix + "self_attn.v_proj.weight": matrix(key, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, query),
            prefix + "self_attn.q_norm.weight": np.ones(shape.head_dim, np.float32),
            prefix + "self_attn.k_norm.weight": np.ones(shape.head_dim, np.float32),
            prefix + "mlp.gate_proj.weight": matrix(shape.ffn_size, hidden),
            prefix + "mlp.up_proj.weight": matrix(shape.ffn_size, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, shape.ffn_size),
        }
    return weights
