"""Write a small random checkpoint with a long context, for workloads that measure only cost."""

from __future__ import annotations

import enum
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from session_server.demo import MODEL_DIR

_COPIED_FILES = ("tokenizer_config.json", "chat_template.jinja")
_BARE_NAMES: Final = ("A_log", "dt_bias")
"""Of tensors that are no part of a module of their own."""

WINDOW: Final = 512
"""Positions that a token of a windowed model sees."""

_CONV_WIDTH: Final = 4


class Mixer(enum.Enum):
    """Choose what all layers mix tokens by; the value is its name in a configuration."""

    FULL = "full_attention"
    WINDOW = "sliding_attention"
    DELTA = "linear_attention"


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Describe the shape of a random Qwen model, as its configuration does.

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


_QWEN3: Final[dict[str, Any]] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_ARCHITECTURES: Final[Mapping[Mixer, Mapping[str, Any]]] = {
    Mixer.FULL: _QWEN3,
    Mixer.WINDOW: _QWEN3
    | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    Mixer.DELTA: {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
}


def write_random_checkpoint(directory: Path, shape: RandomModel, mixer: Mixer = Mixer.FULL) -> Path:
    """Write a Hugging Face checkpoint of random weights with the embedded tokenizer: of Qwen3, or
    of Qwen3.5 with gated delta rules, which have the shape's heads. Its last layer is attention
    with one head, because every such model has some.

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
        **_ARCHITECTURES[mixer],
        **asdict(shape),
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    if mixer is Mixer.DELTA:
        config |= {
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "layer_types": [each.value for each in _layers(shape, mixer)],
            "linear_num_key_heads": shape.num_key_value_heads,
            "linear_num_value_heads": shape.num_attention_heads,
            "linear_key_head_dim": shape.head_dim,
            "linear_value_head_dim": shape.head_dim,
            "linear_conv_kernel_dim": _CONV_WIDTH,
        }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    save_file(_random_weights(shape, mixer, vocab_size), directory / "model.safetensors")
    return directory


def _random_weights(shape: RandomModel, mixer: Mixer, vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden = shape.hidden_size
    ffn = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (shape.intermediate_size, hidden),
        "mlp.up_proj": (shape.intermediate_size, hidden),
        "mlp.down_proj": (hidden, shape.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocab_size, hidden), "norm": (hidden,)}
    for layer, kind in enumerate(_layers(shape, mixer)):
        layer_shapes = ffn | (_delta(shape) if kind is Mixer.DELTA else _attention(shape, mixer))
        shapes |= {f"layers.{layer}.{name}": size for name, size in layer_shapes.items()}
    return {
        f"model.{name}{_suffix(name)}": np.ones(size, np.float32)
        if len(size) == 1
        else rng.normal(0.0, 0.08, size).astype(np.float32)
        for name, size in shapes.items()
    }


def _layers(shape: RandomModel, mixer: Mixer) -> list[Mixer]:
    layers = [mixer] * shape.num_hidden_layers
    if mixer is Mixer.DELTA:
        layers[-1] = Mixer.FULL
    return layers


def _suffix(name: str) -> str:
    return "" if name.endswith(_BARE_NAMES) else ".weight"


def _attention(shape: RandomModel, mixer: Mixer) -> dict[str, tuple[int, ...]]:
    hidden, query = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    key, queries = shape.num_key_value_heads * shape.head_dim, query
    if mixer is Mixer.DELTA:  # one head, and a gate for what it gives
        query = key = shape.head_dim
        queries = 2 * query
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
    }


def _delta(shape: RandomModel) -> dict[str, tuple[int, ...]]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    values, keys = heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return {
        "linear_attn.in_proj_qkv": (2 * keys + values, hidden),
        "linear_attn.in_proj_z": (values, hidden),
        "linear_attn.in_proj_b": (heads, hidden),
        "linear_attn.in_proj_a": (heads, hidden),
        "linear_attn.conv1d": (2 * keys + values, 1, _CONV_WIDTH),
        "linear_attn.out_proj": (hidden, values),
        "linear_attn.norm": (shape.head_dim,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
    }
