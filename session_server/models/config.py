"""What a model is: frozen, free of torch, made by `registry.load_config` from a `config.json`.

A model is a list of layers, and a layer is a mixer (attention) and an ffn. Families differ in
these descriptions only; there is one decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal

from cache.spec import CacheSpec, LayerGroup, LayerKind
from cache.types import PoolName

FULL_POOL: Final = PoolName("full")
"""The pool of full attention layers."""

WINDOW_POOL: Final = PoolName("window")
"""The pool of sliding window layers."""

LATENT_POOL: Final = PoolName("latent")
"""The pool of multi-head latent attention layers."""

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


class QkNorm(Enum):
    """What of Q and K is normalised together."""

    NONE = "none"
    HEAD = "head"
    PROJECTION = "projection"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention over the whole context, or over a sliding window of it.

    `scale`: factor on the scores. `window`: positions a token sees, its own included; None for all.
    `softcap`: scores are squashed into (-softcap, softcap). `has_sinks`: every head has a score
    that takes part in the softmax and brings no value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def pool(self) -> PoolName:
        """Where its K and V are kept."""
        return FULL_POOL if self.window is None else WINDOW_POOL

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated: all."""
        return self.head_dim

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """What such layers store."""
        return LayerGroup(
            pool=self.pool,
            kind=LayerKind.FULL if self.window is None else LayerKind.WINDOW,
            layers=layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=DTYPE_BYTES[dtype],
            window=self.window or 0,
        )


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (MLA, DeepSeek-AI 2024).

    `rank`: elements of the latent that K and V are made of. `q_rank`: of the one that queries are
    made of; None where they are projected at once. `nope_dim`, `rope_dim`: elements of a key of one
    head that know no position, and of the rotated key that all heads share. `value_dim`: of a
    value. `scale`: factor on the scores. `bias`: on projections from and to the hidden state.
    """

    num_heads: int
    rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeConfig
    bias: bool = False

    @property
    def pool(self) -> PoolName:
        """Where its latents are kept."""
        return LATENT_POOL

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """What such layers store."""
        return LayerGroup(
            pool=self.pool,
            kind=LayerKind.LATENT,
            layers=layers,
            num_kv_heads=1,
            head_dim=self.rank + self.rope_dim,
            dtype_bytes=DTYPE_BYTES[dtype],
            rope_dim=self.rope_dim,
        )


class GateKind(Enum):
    """How the gate of a feed-forward acts on the other half."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED = "clamped"


@dataclass(frozen=True, slots=True)
class GateConfig:
    """The activation. `alpha`, `limit`: sharpness and bounds of `CLAMPED` (gpt-oss)."""

    kind: GateKind = GateKind.SILU
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """Gated feed-forward (Shazeer 2020)."""

    intermediate_size: int
    bias: bool = False
    gate: GateConfig = GateConfig()


class ExpertLayout(Enum):
    """How a checkpoint spells its experts."""

    QWEN = "qwen"
    """Every expert by itself, or all of them stacked, outputs before inputs."""
    GPT_OSS = "gpt_oss"
    """Stacked, inputs before outputs, gate and up taking turns; or MXFP4 blocks and scales."""


class Scoring(Enum):
    """How a router's outputs become the shares of experts."""

    SOFTMAX = "softmax"
    """Of all experts. A group is as good as its best one."""
    SIGMOID = "sigmoid"
    """Each on its own. A learned correction counts where experts are chosen, not in their weights,
    and a group is as good as its two best together (DeepSeek-AI 2024, the V3 report)."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Experts are chosen from the best `num_chosen_groups` of `num_groups` groups of neighbours.

    `weight_scale` multiplies the weights of the chosen.
    """

    scoring: Scoring = Scoring.SOFTMAX
    num_groups: int = 1
    num_chosen_groups: int = 1
    weight_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts (Shazeer et al. 2017), the best `num_chosen` of them for every token.

    `normalised`: the weights of the chosen add up to one, instead of those of all experts.
    `shared`: what every token goes through besides (Dai et al. 2024).
    """

    num_experts: int
    num_chosen: int
    expert: MlpConfig
    normalised: bool
    layout: ExpertLayout
    router_bias: bool = False
    routing: RoutingConfig = RoutingConfig()
    shared: MlpConfig | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer."""

    mixer: AttentionConfig | MlaConfig
    ffn: MlpConfig | MoeConfig


class NormPlacement(Enum):
    """Where in a layer the norms stand, seen from mixer and ffn."""

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Root-mean-square norms. `adds_one`: the gain is one more than the weight stored."""

    eps: float
    placement: NormPlacement = NormPlacement.PRE
    adds_one: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder and the cache need to know of a checkpoint.

    `max_context_len`: positions the model can address. `dtype`: what the checkpoint says it was
    saved in. `embedding_scale` multiplies embeddings; `logit_softcap` squashes logits.
    `num_draft_layers`: layers behind the last that guess further tokens, and are not loaded.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    tied_embeddings: bool
    max_context_len: int
    dtype: DTypeName
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    num_draft_layers: int = 0

    @property
    def pools(self) -> Mapping[PoolName, tuple[int, ...]]:
        """The layers of every pool, as indices into the model."""
        by_pool: dict[PoolName, list[int]] = {}
        for index, layer in enumerate(self.layers):
            by_pool.setdefault(layer.mixer.pool, []).append(index)
        return MappingProxyType({pool: tuple(by_pool[pool]) for pool in sorted(by_pool)})

    def mixer_of(self, pool: PoolName) -> AttentionConfig | MlaConfig:
        """What the layers of a pool have in common: all that attention needs to know."""
        mixers = [self.layers[index].mixer for index in self.pools[pool]]
        assert len({(mixer.num_heads, mixer.group((), self.dtype)) for mixer in mixers}) == 1, (
            "layers of one pool store and read the same"
        )
        return mixers[0]

    def cache_spec(
        self, page_size: int, dtype: DTypeName, kv_dtype: DTypeName | None = None
    ) -> CacheSpec:
        """What the layers store per position.

        Args:
            page_size: positions of a page.
            dtype: what the model computes in.
            kv_dtype: what K, V and latents are stored in; None for `dtype`.
        """
        groups = (self.mixer_of(pool).group(layers, dtype) for pool, layers in self.pools.items())
        if kv_dtype is not None and kv_dtype != dtype:
            groups = (
                replace(group, dtype_bytes=DTYPE_BYTES[kv_dtype], stored_as=kv_dtype)
                for group in groups
            )
        return CacheSpec(tuple(groups), page_size)
