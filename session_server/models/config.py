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

STATE_POOL: Final = PoolName("state")
"""The pool of recurrent layers, whose pages are states."""

STATE_BYTES: Final = 4
"""Of one element of a state: fp32, whatever the weights are."""

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
    `beta_fast` of YaRN (Peng et al. 2023). `attention_factor` multiplies cosines and sines. `dim`:
    elements of a head that are rotated, the first ones; None for all.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    original_context_len: int = 0
    attention_factor: float = 1.0
    truncate: bool = True
    dim: int | None = None


class QkNorm(Enum):
    """What of Q and K is normalised together."""

    NONE = "none"
    HEAD = "head"
    PROJECTION = "projection"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention over the whole context, or over a sliding window of it.

    `scale`: factor on the scores. `rope`: None where heads know no positions. `window`: positions a
    token sees, its own included; None for all. `softcap`: scores are squashed into (-softcap,
    softcap). `has_sinks`: every head has a score that takes part in the softmax and brings no
    value. `is_gated`: what a head gives goes through a gate that is made of the input.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_gated: bool = False

    @property
    def pool(self) -> PoolName:
        """Where its K and V are kept."""
        return FULL_POOL if self.window is None else WINDOW_POOL

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated, the first ones."""
        return (self.rope.dim if self.rope is not None else None) or self.head_dim

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


class _Recurrent:
    """What recurrent layers have in common: a pool, and no positions."""

    __slots__ = ()

    @property
    def pool(self) -> PoolName:
        """Where its states are kept."""
        return STATE_POOL

    @property
    def rope(self) -> None:
        """Order is all it knows of positions."""
        return

    @property
    def rope_dim(self) -> int:
        """Nothing is rotated."""
        return 0


@dataclass(frozen=True, slots=True)
class ShortConvConfig(_Recurrent):
    """A gated convolution of every channel by itself (LFM2, Liquid AI 2025).

    `width`: tokens it sees, its own included.
    """

    channels: int
    width: int
    bias: bool = False

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """What such layers store: their last inputs."""
        del dtype
        return _states(layers, (self.width - 1, self.channels))


@dataclass(frozen=True, slots=True)
class Mamba2Config(_Recurrent):
    """A selective state space with one decay per head (Mamba2, Dao and Gu 2024).

    `num_groups`: of heads that share what writes to and reads from their states. `state_size`:
    elements of a state per element of a head. `width`: tokens its convolution sees. `step_limits`:
    bounds of a step's length. `bias`: on projections; `conv_bias`: on the convolution.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    width: int
    step_limits: tuple[float, float]
    conv_bias: bool = True
    bias: bool = False

    @property
    def inner_size(self) -> int:
        """Elements of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: heads, and what writes and reads in every group."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """What such layers store: the last inputs of the convolution, and the states of heads."""
        del dtype
        heads = (self.num_heads, self.head_dim, self.state_size)
        return _states(layers, (self.width - 1, self.conv_size), heads)


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig(_Recurrent):
    """A gated delta rule (Yang et al. 2025): a state per head that maps keys to values.

    `num_key_heads`: of keys and queries, each for some neighbouring value heads. `width`: tokens
    its convolution sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def keys_size(self) -> int:
        """Elements of all keys together, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """Elements of all values together."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """What such layers store: the last inputs of the convolution, and the states of heads."""
        del dtype
        heads = (self.num_value_heads, self.key_dim, self.value_dim)
        return _states(layers, (self.width - 1, self.conv_size), heads)


def _states(layers: tuple[int, ...], *shapes: tuple[int, ...]) -> LayerGroup:
    return LayerGroup(
        pool=STATE_POOL,
        kind=LayerKind.RECURRENT,
        layers=layers,
        num_kv_heads=0,
        head_dim=0,
        dtype_bytes=STATE_BYTES,
        state_shapes=shapes,
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


class MlpLayout(Enum):
    """What a checkpoint calls the matrices of a feed-forward: gate, up and down."""

    LLAMA = ("gate_proj", "up_proj", "down_proj")
    LFM2 = ("w1", "w3", "w2")
    GRANITE = ("input_linear", "output_linear")
    """Gate and up in one, gate first."""


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """Gated feed-forward (Shazeer 2020)."""

    intermediate_size: int
    bias: bool = False
    gate: GateConfig = GateConfig()
    layout: MlpLayout = MlpLayout.LLAMA


class ExpertLayout(Enum):
    """How a checkpoint spells its experts."""

    QWEN = "qwen"
    """Every expert by itself, or all of them stacked, outputs before inputs."""
    GRANITE = "granite"
    """Stacked, outputs before inputs; beside what every token goes through."""
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


MixerConfig = AttentionConfig | MlaConfig | ShortConvConfig | Mamba2Config | GatedDeltaConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer. `residual_scale`: factor on what its mixer and its ffn add."""

    mixer: MixerConfig
    ffn: MlpConfig | MoeConfig
    residual_scale: float = 1.0


class NormPlacement(Enum):
    """Where in a layer the norms stand, seen from mixer and ffn."""

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Root-mean-square norms. `adds_one`: the gain is one more than the weight stored.
    `final_scale`: factor on the gain of the last one, before the head.
    """

    eps: float
    placement: NormPlacement = NormPlacement.PRE
    adds_one: bool = False
    final_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Spelling:
    """What a checkpoint calls the parts of a model and of a layer.

    `norms`: before and after the mixer, before and after the ffn; None for the names most families
    have where theirs are placed. `qk_norm`: of Q and K, `{}` standing for either.
    """

    norms: tuple[str | None, ...] | None = None
    final_norm: str = "norm"
    attention_output: str = "o_proj"
    qk_norm: str = "{}_norm"
    ffn: str = "mlp."


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
    spelling: Spelling = Spelling()

    @property
    def pools(self) -> Mapping[PoolName, tuple[int, ...]]:
        """The layers of every pool, as indices into the model."""
        by_pool: dict[PoolName, list[int]] = {}
        for index, layer in enumerate(self.layers):
            by_pool.setdefault(layer.mixer.pool, []).append(index)
        return MappingProxyType({pool: tuple(by_pool[pool]) for pool in sorted(by_pool)})

    def mixer_of(self, pool: PoolName) -> MixerConfig:
        """What the layers of a pool have in common: all that attention needs to know."""
        mixers = [self.layers[index].mixer for index in self.pools[pool]]
        heads = {m.num_heads for m in mixers if isinstance(m, AttentionConfig | MlaConfig)}
        stored = {mixer.group((), self.dtype) for mixer in mixers}
        assert len(heads) <= 1 == len(stored), "layers of one pool store and read the same"
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
                group
                if group.kind is LayerKind.RECURRENT
                else replace(group, dtype_bytes=DTYPE_BYTES[kv_dtype], stored_as=kv_dtype)
                for group in groups
            )
        return CacheSpec(tuple(groups), page_size)
