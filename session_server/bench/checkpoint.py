"""Write a small random checkpoint with a long context, for workloads that measure only cost."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from session_server.demo import MODEL_DIR

_COPIED_FILES = ("tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Describe the shape of a random Qwen3 model, as its configuration does.

    `vocab_size`: at least that of the embedded tokenizer; None for exactly that.
    """

    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    max_position_embeddings: int = 16_384
    vocab_size: int | None = None


def write_random_checkpoint(directory: Path, shape: RandomModel) -> Path:
    """Write a Hugging Face checkpoint of random weights with the embedded tokenizer.

    The weights are float32, drawn with a standard deviation of 0.08. A vocabulary larger than the
    tokenizer's is filled up with ASCII words, so that every id decodes to text of its own. Returns
    `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in _COPIED_FILES:
        shutil.copy(MODEL_DIR / name, directory / name)
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocab_size = shape.vocab_size or len(vocabulary)
    assert vocab_size >= len(vocabulary), "the tokenizer's ids are in the vocabulary"
    vocabulary |= {f"Ġw{token_id}": token_id for token_id in range(len(vocabulary), vocab_size)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(shape),
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
    rng = np.random.default_rng(0)
    hidden, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    key = shape.num_key_value_heads * shape.head_dim
    layer_shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate_proj": (shape.intermediate_size, hidden),
        "mlp.up_proj": (shape.intermediate_size, hidden),
        "mlp.down_proj": (hidden, shape.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocab_size, hidden), "norm": (hidden,)}
    for layer in range(shape.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": size for name, size in layer_shapes.items()}
    return {
        f"model.{name}.weight": np.ones(size, np.float32)
        if len(size) == 1
        else rng.normal(0.0, 0.08, size).astype(np.float32)
        for name, size in shapes.items()
    }
