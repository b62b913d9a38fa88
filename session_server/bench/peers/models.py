"""Write the models that peers are compared on: random Qwen3 checkpoints, and the same as GGUF."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint

SHAPES: Final[Mapping[str, RandomModel]] = MappingProxyType(
    {
        "100m": RandomModel(
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            intermediate_size=2048,
            vocab_size=32_000,
        ),
        "0.6b": RandomModel(
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            vocab_size=151_936,
        ),
    }
)
"""Models by name: 100 million parameters, and the shape of Qwen3-0.6B."""

GGUF_TYPES: Final = ("F32", "BF16", "F16", "Q8_0")

_NUMPY_TYPES: Final = MappingProxyType({"F32": "<f4", "F16": "<f2", "BF16": "<u2"})
_LAYER_TENSORS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
_TENSORS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
)
_NORMAL_TOKEN: Final = 1
"""What GGUF calls a token that stands for its text."""
_LENGTH_BYTES: Final = 8
"""At the beginning of a safetensors file: how long its header is."""


class _Entry(NamedTuple):
    """Locate one tensor: its file, name, type as safetensors names it, shape, and first byte."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True, slots=True)
class BenchModel:
    """Locate a checkpoint, and the directory where its GGUF files are written."""

    name: str
    checkpoint: Path
    gguf_dir: Path

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the model's configuration, as in `config.json`."""
        config: dict[str, Any] = json.loads((self.checkpoint / "config.json").read_text())
        return config

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids."""
        return int(self.config["vocab_size"])

    @property
    def num_parameters(self) -> int:
        """Return the number of weights that a decode step reads: all but untied embeddings."""
        counts = {entry.name: math.prod(entry.shape) for entry in _entries(self.checkpoint)}
        if "lm_head.weight" in counts:
            counts.pop("model.embed_tokens.weight", None)
        return sum(counts.values())

    @property
    def kv_values_per_token(self) -> int:
        """Return how many numbers of keys and values a token leaves in all layers."""
        config = self.config
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(2 * config["num_hidden_layers"] * heads * head_dim)


def prepare_model(model: str, work_dir: Path) -> BenchModel:
    """Return the model of a name in `SHAPES`, written to `work_dir` if it is not there yet, or the
    checkpoint in the directory `model`.

    Raises:
        FileNotFoundError: it is neither such a name nor a directory with a `config.json`.
    """
    shape = SHAPES.get(model)
    if shape is None:
        path = Path(model)
        if not (path / "config.json").is_file():
            names = ", ".join(SHAPES)
            raise FileNotFoundError(
                f"--model {model}: neither one of {names} nor a directory with a config.json"
            )
        digest = _digest({"path": str(path.resolve())})
        return BenchModel(path.name, path, work_dir / f"{path.name}-{digest}")
    directory = work_dir / f"{model}-{_digest(asdict(shape))}"
    if not directory.is_dir():
        partial = directory.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_random_checkpoint(partial, shape)
        partial.rename(directory)
    return BenchModel(model, directory, directory)


def why_no_gguf(model: BenchModel) -> str | None:
    """Return why the model cannot be written as GGUF, and None if it can."""
    if model.config.get("model_type") != "qwen3":
        return "it is not a dense Qwen3 model, and no other is written as GGUF"
    if importlib.util.find_spec("gguf") is None:
        return "the package gguf is missing (pip install 'session-server[peers]')"
    kinds = {entry.dtype for entry in _entries(model.checkpoint)}
    if not kinds <= set(_NUMPY_TYPES):
        return f"its weights are {', '.join(sorted(kinds))}, and only floats are read"
    return None


def prepare_gguf(model: BenchModel, gguf_type: str) -> Path:
    """Return the model as GGUF with weights of `gguf_type`, written if it is not there yet.

    Tensors go over as they are: llama.cpp rotates the halves of Qwen3's heads, as its publishers
    do. Norms stay F32. The vocabulary is made up, because prompts are token ids.
    `why_no_gguf` is None for the model.
    """
    path = model.gguf_dir / f"{gguf_type.lower()}.gguf"
    if path.is_file():
        return path
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3")
    writer.add_file_type(gguf.LlamaFileType[_file_type(gguf_type)])
    _add_shape(writer, model.config)
    _add_vocabulary(writer, model.vocab_size)
    for name, tensor in _tensors(model.checkpoint):
        kind = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else gguf_type]
        stored = gguf.quants.quantize(tensor, kind)
        # The writer knows these by their numpy type, and the others by what it is told.
        is_plain = gguf_type in {"F32", "F16"} or tensor.ndim == 1
        writer.add_tensor(gguf_name(name), stored, raw_dtype=None if is_plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls the tensor that Hugging Face calls `name`."""
    if name in _TENSORS:
        return _TENSORS[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_TENSORS[rest.removesuffix('.weight')]}.weight"


def _add_shape(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])


def _add_vocabulary(writer: Any, vocab_size: int) -> None:
    """Add an ASCII word for every id. A token that is a byte would do harm: llama.cpp holds back
    what is not yet a whole character, and its token ids with it."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"Ġw{token_id}" for token_id in range(vocab_size)])
    writer.add_token_types([_NORMAL_TOKEN] * vocab_size)
    writer.add_token_merges(["Ġ w"])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _file_type(gguf_type: str) -> str:
    return "ALL_F32" if gguf_type == "F32" else f"MOSTLY_{gguf_type}"


def _tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield all tensors, one after the other, as float32."""
    for entry in _entries(checkpoint):
        kind, count = _NUMPY_TYPES[entry.dtype], math.prod(entry.shape)
        stored = np.fromfile(entry.path, kind, count, offset=entry.begin)
        if entry.dtype == "BF16":  # the upper half of a float32
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        yield entry.name, stored.astype(np.float32, copy=False).reshape(entry.shape)


def _entries(checkpoint: Path) -> Iterator[_Entry]:
    """Yield what the headers of a checkpoint's safetensors files say of each tensor."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin = _LENGTH_BYTES + length + entry["data_offsets"][0]
                yield _Entry(path, name, entry["dtype"], tuple(entry["shape"]), begin)


def _digest(description: Mapping[str, Any]) -> str:
    text = json.dumps(description, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:8]
