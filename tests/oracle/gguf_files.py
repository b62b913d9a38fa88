"""GGUF files from checkpoints of `transformers`, written with the `gguf` package.

Rows are permuted, gains shifted and experts stacked as llama.cpp's converters do it; the names are
those of the package's own tables. What a block type cannot hold is changed in the checkpoint too,
which is then what the file stands for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.oracle.checkpoints import WEIGHT_STD

Array = NDArray[Any]
Choose = Callable[[str], GGMLQuantizationType]
"""The type of a matrix, by Hugging Face's name."""

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "lfm2": "lfm2",
}


K_SCALES = {
    "Q4_K": {0: 1 / 230, 2: 7.5 / 230},
    "Q5_K": {0: 1 / 460, 2: 15.5 / 460},
    "Q6_K": {208: 1 / 1400},
}
"""Where the scales of a block are, and how large: codes times their scales spread over hundreds,
and minimums lie in the middle of codes."""


def write_gguf(
    directory: Path,
    path: Path,
    choose: Choose = lambda _: GGMLQuantizationType.F32,
    describe: Callable[[GGUFWriter], None] = lambda _: None,
) -> Path:
    """Write the file of a checkpoint; `describe` adds metadata. The checkpoint may be changed."""
    raw = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[raw["model_type"]]
    writer = GGUFWriter(path, architecture)
    tensors = load_file(directory / "model.safetensors")
    w1 = tensors.get("model.layers.0.feed_forward.w1.weight")
    size = raw["intermediate_size"] if w1 is None else len(w1)
    _add_config(writer, {**raw, "intermediate_size": size}, architecture)
    describe(writer)
    meant = {}
    stacked: dict[str, list[Array]] = {}
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, raw["num_hidden_layers"])
    for name, tensor in _one_by_one(tensors).items():
        kind = choose(name) if name.endswith(".weight") and tensor.dim() == 2 else None
        numbers = _permuted(name, tensor.float().numpy(), raw, architecture)
        if name.endswith("conv.conv.weight"):
            numbers = numbers.squeeze(1)
        packed, meaning = pack(numbers, kind or GGMLQuantizationType.F32, seed=len(meant))
        meaning = _unpermuted(name, meaning, raw, architecture).copy()
        meant[name] = torch.from_numpy(meaning).view(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            packed = packed + 1
        stem, _, suffix = name.rpartition(".")
        if ".experts." in name:
            before, _, after = stem.partition(".experts.")
            merged = f"{before}.experts.{after.partition('.')[2]}"
            stacked.setdefault(f"{names.get_name(merged)}.{suffix}", []).append(packed)
            continue
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", packed, raw_dtype=kind)
    for name, parts in stacked.items():
        kind = choose("model.layers.0.mlp.experts.0.gate_proj.weight")
        writer.add_tensor(name, np.stack(parts), raw_dtype=kind)
    if raw.get("rope_parameters", {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(raw))
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    save_file(meant, directory / "model.safetensors", metadata={"format": "pt"})
    return path


def pack(numbers: Array, kind: GGMLQuantizationType, seed: int = 0) -> tuple[Array, Array]:
    """What is stored of a matrix, and what it means. K types: random codes, not the nearest."""
    if kind is GGMLQuantizationType.F32:
        return numbers, numbers
    if kind.name.endswith("_K"):
        packed = _random_blocks(numbers, kind, np.random.default_rng(seed))
    else:
        packed = gguf.quants.quantize(numbers, kind)
    return packed, gguf.quants.dequantize(packed, kind)


def _random_blocks(numbers: Array, kind: GGMLQuantizationType, rng: np.random.Generator) -> Array:
    """Blocks of random codes and scales, whose numbers are about as large as usual ones."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (numbers.shape[0], numbers.shape[1] // block, num_bytes)
    packed = rng.integers(0, 256, shape, dtype=np.uint8)
    for start, size in K_SCALES[kind.name].items():
        scale = np.frombuffer(np.float16(WEIGHT_STD * size).tobytes(), np.uint8)
        packed[..., start : start + 2] = scale
    return packed.reshape(shape[0], -1)


def _one_by_one(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split experts that v5 stacks."""
    result = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[name] = tensor
            continue
        prefix = name.rpartition(".")[0]
        for index, matrix in enumerate(tensor):
            if name.endswith("down_proj"):
                result[f"{prefix}.{index}.down_proj.weight"] = matrix
                continue
            gate, up = matrix.chunk(2)
            result[f"{prefix}.{index}.gate_proj.weight"] = gate
            result[f"{prefix}.{index}.up_proj.weight"] = up
    return result


def _heads_of(name: str, raw: Mapping[str, Any], architecture: str) -> int:
    if architecture != "llama" or ".self_attn." not in name:
        return 0
    sides = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}
    return int(next((num for side, num in sides.items() if side in name), 0))


def _permuted(name: str, numbers: Array, raw: Mapping[str, Any], architecture: str) -> Array:
    num_heads = _heads_of(name, raw, architecture)
    if num_heads == 0:
        return numbers
    halves = numbers.reshape(num_heads, 2, -1, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))


def _unpermuted(name: str, numbers: Array, raw: Mapping[str, Any], architecture: str) -> Array:
    num_heads = _heads_of(name, raw, architecture)
    if num_heads == 0:
        return numbers
    pairs = numbers.reshape(num_heads, -1, 2, *numbers.shape[1:])
    return pairs.swapaxes(1, 2).reshape(numbers.shape)


def _add_config(writer: GGUFWriter, raw: Mapping[str, Any], architecture: str) -> None:
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    num_kv_heads: int | list[int] = raw["num_key_value_heads"]
    if architecture == "lfm2":
        attends = [kind == "full_attention" for kind in raw["layer_types"]]
        num_kv_heads = [raw["num_key_value_heads"] * flag for flag in attends]
        writer.add_shortconv_l_cache(raw["conv_L_cache"])
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(raw.get("rms_norm_eps") or raw["norm_eps"])
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if architecture == "qwen3moe":
        writer.add_expert_count(raw.get("num_experts") or raw["num_local_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if architecture.startswith("gemma"):
        writer.add_sliding_window(raw["sliding_window"])
        if raw.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        if raw.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if "sliding_attention" in rope:
        base = rope["sliding_attention"]["rope_theta"]
        writer.add_float32(f"{architecture}.rope.freq_base_swa", base)


def _rope_factors(raw: Mapping[str, Any]) -> Array:
    """Llama 3.1's scaling, as the converter spells it out."""
    rope = raw["rope_parameters"]
    dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / (kept + (1 - kept) / rope["factor"]))
    return np.array(factors, np.float32)
