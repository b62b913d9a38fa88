"""What a model is: frozen, free of torch, made by `registry.load_config` from a `config.json`.

A model is a list of layers, and a layer is a mixer (attention) and an ffn. Families differ in
these descriptions only; there is one decoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from cache.spec import CacheSpec, LayerGroup, LayerKind
from cache.types import PoolName

FULL_POOL: Final = PoolName("full")
"""The pool of full attention layers."""

DTypeName = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: Final[dict[DTypeName, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}


class RopeKind(Enum):
    """How rotary frequencies are stretched beyond the trained context."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling.

    `low` and `high` are `low_freq_factor`, `high_freq_factor` of llama3, or `beta_slow`,
    `beta_fast` of YaRN (Peng et al. 2023). `attention_factor` multiplies cosines and sines.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    original_context_len: int = 0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention over the whole context."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """SwiGLU feed-forward (Shazeer 2020)."""

    intermediate_size: int
    bias: bool


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer."""

    mixer: AttentionConfig
    ffn: MlpConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder and the cache need to know of a checkpoint.

    `max_context_len`: positions the model can address. `dtype`: what the checkpoint says it was
    saved in. `warnings`: what the operator should know, for instance a shortened context.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    rope: RopeConfig
    norm_eps: float
    tied_embeddings: bool
    max_context_len: int
    dtype: DTypeName
    warnings: tuple[str, ...] = ()

    def cache_spec(self, page_size: int, dtype: DTypeName) -> CacheSpec:
        """What the layers store per position, with elements of `dtype`."""
        mixers = {layer.mixer for layer in self.layers}
        assert len(mixers) == 1, "layers of one pool store the same thing"
        mixer = mixers.pop()
        group = LayerGroup(
            pool=FULL_POOL,
            kind=LayerKind.FULL,
            layers=tuple(range(len(self.layers))),
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            dtype_bytes=DTYPE_BYTES[dtype],
        )
        return CacheSpec((group,), page_size)
