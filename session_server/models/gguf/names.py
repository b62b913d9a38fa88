"""Translate the names of tensors in GGUF files to those of Hugging Face's checkpoints.

The names are those that llama.cpp's converters write (`gguf/tensor_mapping.py`). Experts are
stacked there, and single matrices here; rows of Q and K of `llama` are stored with rotary pairs
adjacent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from session_server.models.bounds import MAX_EXPERTS, MAX_EXPERTS_IN_ALL
from session_server.models.errors import CheckpointError, shortened
from session_server.models.gguf.reader import GgufFile, GgufTensor

ROPE_FACTORS: Final = "rope_freqs.weight"
"""What rotary frequencies are divided by: part of the configuration."""

_GLOBAL: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "token_embd_norm": "model.embedding_norm",
}

_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}

_SANDWICH: Final = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Gemma's: norms before and after."""

_LFM2: Final = _LAYER | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}

_LAYERS: Final = {"gemma2": _SANDWICH, "gemma3": _SANDWICH, "lfm2": _LFM2}
"""Names in a layer, of architectures that have their own."""

_EXPERTS: Final = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}

_IN_LAYER: Final = re.compile(r"blk\.(\d{1,4})\.([a-z_]+(?:\.[a-z_]+)?)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Say where a tensor of Hugging Face's naming lies.

    `index`: of the expert in a stacked tensor, None for the whole. `num_paired_heads`: heads whose
    rotary pairs are adjacent rows, 0 where halves are paired as in Hugging Face's layout.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    index: int | None = None
    num_paired_heads: int = 0


def stored_parts(file: GgufFile, num_heads: Mapping[str, int]) -> dict[str, StoredPart]:
    """Return the parts of a file by Hugging Face's names; unknown names stay as they are.

    `num_heads`: of `attn_q` and `attn_k`.

    Raises:
        CheckpointError: more experts than a model may have.
    """
    _check_experts(file)
    architecture = file.word("general.architecture")
    parts: dict[str, StoredPart] = {}
    for name, tensor in file.tensors.items():
        if name != ROPE_FACTORS:
            parts.update(_parts(architecture, name, tensor, num_heads))
    return parts


def _check_experts(file: GgufFile) -> None:
    """Count experts before any has a name of its own."""
    num_in_all: Counter[str] = Counter()
    for name, tensor in file.tensors.items():
        match = _IN_LAYER.fullmatch(name)
        if match is None or not _is_stack(match[2], tensor):
            continue
        num_experts = tensor.shape[0]
        num_in_all[match[2]] += num_experts
        if num_experts > MAX_EXPERTS or num_in_all[match[2]] > MAX_EXPERTS_IN_ALL:
            raise CheckpointError(
                f"{file.path}: {shortened(name)} has {num_experts:,} experts: more than "
                f"{MAX_EXPERTS:,} in a layer or {MAX_EXPERTS_IN_ALL:,} in all"
            )


def _is_stack(short: str, tensor: GgufTensor) -> bool:
    return short in _EXPERTS and len(tensor.shape) == 3


def _parts(
    architecture: str, name: str, tensor: GgufTensor, num_heads: Mapping[str, int]
) -> Iterator[tuple[str, StoredPart]]:
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        yield f"{_GLOBAL[stem]}.{kind}", StoredPart(tensor, tensor.shape)
        return
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        yield name, StoredPart(tensor, tensor.shape)
        return
    prefix, short = f"model.layers.{match[1]}.", match[2]
    names = _LAYERS.get(architecture, _LAYER)
    if _is_stack(short, tensor):
        for index in range(tensor.shape[0]):
            expert = f"{prefix}mlp.experts.{index}.{_EXPERTS[short]}.{kind}"
            yield expert, StoredPart(tensor, tensor.shape[1:], index)
        return
    paired = num_heads.get(short, 0) if architecture in PAIRED_ARCHITECTURES else 0
    known = f"{prefix}{names[short]}.{kind}" if short in names else name
    shape = tensor.shape
    if short == "shortconv.conv" and len(shape) == 2:
        shape = (shape[0], 1, shape[1])  # a convolution by channel, of one input each
    yield known, StoredPart(tensor, shape, num_paired_heads=paired)


SANDWICH_ARCHITECTURES: Final = frozenset({"gemma2", "gemma3"})
PAIRED_ARCHITECTURES: Final = frozenset({"llama"})
