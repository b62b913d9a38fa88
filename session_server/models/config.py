"""Describe a model: frozen dataclasses without torch, made by `registry.load_config`.

A model is a list of layers; a layer is a mixer (attention or recurrence) and an ffn. Families
differ in these descriptions only; there is one decoder. A field that has a name in Hugging Face's
`config.json` keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal

from cache.spec import CacheSpec, LayerGroup, LayerKind
from cache.types import PoolName
from session_server.models.quantization import QuantizationConfig

FULL_POOL: Final = PoolName("full")
"""The pool of full attention layers."""

WINDOW_POOL: Final = PoolName("window")
"""The pool of sliding window layers."""

LATENT_POOL: Final = PoolName("latent")
"""The pool of multi-head latent attention layers."""

STATE_POOL: Final = PoolName("state")
"""The pool of recurrent layers, whose pages are states."""

STATE_BYTES: Final = 4
"""Bytes of one element of a recurrent state: fp32 for every dtype of the weights."""

DTypeName = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: Final[dict[DTypeName, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}

KvDTypeName = Literal[DTypeName, "fp8_e4m3", "fp8_e5m2"]
"""What K, V and latents can be stored in: 8-bit floats too, by vLLM's and SGLang's names."""

KV_DTYPE_BYTES: Final[dict[KvDTypeName, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


class RopeKind(Enum):
    """Select how rotary frequencies are scaled beyond the trained context (`rope_type`)."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Configure rotary position embeddings (Su et al. 2021) and their scaling.

    `low` and `high` are llama3's `low_freq_factor` and `high_freq_factor`, or YaRN's `beta_slow`
    and `beta_fast` (Peng et al. 2023). `attention_factor` multiplies cosines and sines.
    `rotary_dim`: leading elements of a head that are rotated; None for all of them. `factors`: what
    the frequencies are divided by, one by one, where a checkpoint has them in place of settings.
    """

    rope_theta: float
    rope_type: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    truncate: bool = True
    rotary_dim: int | None = None
    factors: tuple[float, ...] | None = None


class QkNorm(Enum):
    """Select which elements of Q and K share one norm: none, those of a head, or all."""

    NONE = "none"
    HEAD = "head"
    PROJECTION = "projection"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Configure grouped-query attention over the whole context or a sliding window of it.

    `scale`: factor on the scores. `rope`: None for layers without position embeddings.
    `sliding_window`: positions a token attends to, its own included; None for all of them.
    `attn_logit_softcapping`: bounds scores to (-cap, cap) with a tanh. `has_sinks`: each head has a
    learned score that takes part in the softmax and has no value. `is_gated`: a gate computed from
    the layer's input multiplies each head's output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    sliding_window: int | None = None
    attn_logit_softcapping: float | None = None
    has_sinks: bool = False
    is_gated: bool = False

    @property
    def pool(self) -> PoolName:
        """Return the pool that keeps the layer's K and V."""
        return FULL_POOL if self.sliding_window is None else WINDOW_POOL

    @property
    def rotary_dim(self) -> int:
        """Return how many leading elements of a head are rotated."""
        return (self.rope.rotary_dim if self.rope is not None else None) or self.head_dim

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """Describe what such layers store per position."""
        return LayerGroup(
            pool=self.pool,
            kind=LayerKind.FULL if self.sliding_window is None else LayerKind.WINDOW,
            layers=layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=DTYPE_BYTES[dtype],
            window=self.sliding_window or 0,
        )


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Configure multi-head latent attention (MLA, DeepSeek-AI 2024).

    `kv_lora_rank`: elements of the latent that K and V are projected from. `q_lora_rank`: elements
    of the queries' latent; None where queries are projected directly. `qk_nope_head_dim`: elements
    of a head's key without position embedding. `qk_rope_head_dim`: elements of the rotary key that
    all heads share. `v_head_dim`: elements of a head's value. `scale`: factor on the scores.
    `attention_bias`: on projections from and to the hidden state.
    """

    num_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    rope: RopeConfig
    attention_bias: bool = False

    @property
    def pool(self) -> PoolName:
        """Return the pool that keeps the layer's latents."""
        return LATENT_POOL

    @property
    def rotary_dim(self) -> int:
        """Return how many elements of the rotary key are rotated: all."""
        return self.qk_rope_head_dim

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """Describe what such layers store per position."""
        return LayerGroup(
            pool=self.pool,
            kind=LayerKind.LATENT,
            layers=layers,
            num_kv_heads=1,
            head_dim=self.kv_lora_rank + self.qk_rope_head_dim,
            dtype_bytes=DTYPE_BYTES[dtype],
            qk_rope_head_dim=self.qk_rope_head_dim,
        )


class _Recurrent:
    """Share what all recurrent layers have: the state pool, and no position embeddings."""

    __slots__ = ()

    @property
    def pool(self) -> PoolName:
        """Return the pool that keeps the layer's states."""
        return STATE_POOL

    @property
    def rope(self) -> None:
        """Return None: a recurrence has no position embeddings."""
        return

    @property
    def rotary_dim(self) -> int:
        """Return 0: nothing is rotated."""
        return 0


@dataclass(frozen=True, slots=True)
class ShortConvConfig(_Recurrent):
    """Configure a gated depthwise convolution (LFM2, Liquid AI 2025).

    `conv_kernel_size`: tokens the convolution reads, the current one included.
    """

    channels: int
    conv_kernel_size: int
    bias: bool = False

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """Describe what such layers store: the convolution's last inputs."""
        del dtype
        return _states(layers, (self.conv_kernel_size - 1, self.channels))


@dataclass(frozen=True, slots=True)
class Mamba2Config(_Recurrent):
    """Configure a selective state space with one decay per head (Mamba2, Dao and Gu 2024).

    `n_groups`: groups of heads that share the B and C projections. `state_size`: elements of a
    state per element of a head. `conv_kernel_size`: tokens the convolution reads.
    `time_step_limit`: bounds of the discretization step. `bias`: on projections; `conv_bias`: on
    the convolution.
    """

    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel_size: int
    time_step_limit: tuple[float, float]
    conv_bias: bool = True
    bias: bool = False

    @property
    def inner_size(self) -> int:
        """Return the elements of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Return the convolution's channels: all heads, and B and C of every group."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """Describe what such layers store: the convolution's last inputs and the heads' states."""
        del dtype
        heads = (self.num_heads, self.head_dim, self.state_size)
        return _states(layers, (self.conv_kernel_size - 1, self.conv_size), heads)


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig(_Recurrent):
    """Configure a gated delta rule (Yang et al. 2025): each head's state maps keys to values.

    `linear_num_key_heads`: heads of keys and queries, each shared by consecutive value heads.
    `linear_conv_kernel_dim`: tokens the convolution reads, the current one included.
    """

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    @property
    def keys_size(self) -> int:
        """Return the elements of all keys together, which all queries have too."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values_size(self) -> int:
        """Return the elements of all values together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_size(self) -> int:
        """Return the convolution's channels: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    def group(self, layers: tuple[int, ...], dtype: DTypeName) -> LayerGroup:
        """Describe what such layers store: the convolution's last inputs and the heads' states."""
        del dtype
        heads = (self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim)
        return _states(layers, (self.linear_conv_kernel_dim - 1, self.conv_size), heads)


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
    """Select the activation that a feed-forward's gate goes through (`hidden_act`)."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED = "clamped"


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Configure the activation. `alpha`, `swiglu_limit`: slope and bounds of `CLAMPED`."""

    kind: GateKind = GateKind.SILU
    alpha: float = 1.0
    swiglu_limit: float = 0.0


class MlpLayout(Enum):
    """Name a checkpoint's matrices of a feed-forward: gate, up and down."""

    LLAMA = ("gate_proj", "up_proj", "down_proj")
    LFM2 = ("w1", "w3", "w2")
    GRANITE = ("input_linear", "output_linear")
    """Gate and up in one, gate first."""


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """Configure a gated feed-forward (Shazeer 2020)."""

    intermediate_size: int
    bias: bool = False
    gate: GateConfig = GateConfig()
    layout: MlpLayout = MlpLayout.LLAMA


class ExpertLayout(Enum):
    """Select how a checkpoint stores its experts."""

    QWEN = "qwen"
    """One matrix per expert, or all experts stacked; outputs before inputs."""
    GRANITE = "granite"
    """Stacked, outputs before inputs, beside a shared expert."""
    GPT_OSS = "gpt_oss"
    """Stacked, inputs before outputs, gate and up interleaved; or MXFP4 blocks and scales."""


class ScoringFunc(Enum):
    """Select how a router's logits become the weights of experts."""

    SOFTMAX = "softmax"
    """A softmax over all experts. A group scores as its best expert."""
    SIGMOID = "sigmoid"
    """A sigmoid per expert. A learned correction changes which experts are chosen, not their
    weights, and a group scores as its two best experts together (DeepSeek-V3 report, 2024)."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Choose experts from the best `topk_group` of `n_group` groups of consecutive experts.

    `routed_scaling_factor` multiplies the weights of the chosen experts.
    """

    scoring_func: ScoringFunc = ScoringFunc.SOFTMAX
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Configure a mixture of experts (Shazeer et al. 2017) with `num_experts_per_tok` per token.

    `norm_topk_prob`: scale the weights of the chosen experts so that they add up to one.
    `shared_expert`: the feed-forward that every token goes through besides (Dai et al. 2024).
    """

    num_experts: int
    num_experts_per_tok: int
    expert: MlpConfig
    norm_topk_prob: bool
    layout: ExpertLayout
    router_bias: bool = False
    routing: RoutingConfig = RoutingConfig()
    shared_expert: MlpConfig | None = None


MixerConfig = AttentionConfig | MlaConfig | ShortConvConfig | Mamba2Config | GatedDeltaConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Configure one decoder layer. `residual_multiplier`: factor on what mixer and ffn add."""

    mixer: MixerConfig
    ffn: MlpConfig | MoeConfig
    residual_multiplier: float = 1.0


class NormPlacement(Enum):
    """Place a layer's norms before mixer and ffn, after them, or both."""

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Configure root-mean-square norms. `adds_one`: the gain is the stored weight plus one.
    `final_scale`: factor on the gain of the last norm, before the LM head.
    """

    rms_norm_eps: float
    placement: NormPlacement = NormPlacement.PRE
    adds_one: bool = False
    final_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Spelling:
    """Name a checkpoint's tensors of a model and of a layer.

    `norms`: names before and after the mixer, before and after the ffn; None for the usual names.
    `qk_norm`: name of the norms of Q and K, with `{}` for either letter.
    """

    norms: tuple[str | None, ...] | None = None
    final_norm: str = "norm"
    attention_output: str = "o_proj"
    qk_norm: str = "{}_norm"
    ffn: str = "mlp."


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Describe everything the decoder and the cache need to know about a checkpoint.

    `max_position_embeddings`: positions the model can address. `dtype`: what the checkpoint says it
    was saved in. `embedding_multiplier`: factor on embeddings. `final_logit_softcapping`: bounds
    logits with a tanh. `num_nextn_predict_layers`: layers after the last that predict further
    tokens; they are not loaded. `quantization`: how matrices are stored, None for floats.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: DTypeName
    embedding_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    num_nextn_predict_layers: int = 0
    spelling: Spelling = Spelling()
    quantization: QuantizationConfig | None = None

    @property
    def pools(self) -> Mapping[PoolName, tuple[int, ...]]:
        """Return the indices of each pool's layers."""
        by_pool: dict[PoolName, list[int]] = {}
        for index, layer in enumerate(self.layers):
            by_pool.setdefault(layer.mixer.pool, []).append(index)
        return MappingProxyType({pool: tuple(by_pool[pool]) for pool in sorted(by_pool)})

    def mixer_of(self, pool: PoolName) -> MixerConfig:
        """Return the mixer that all layers of a pool share: all that attention needs to know."""
        mixers = [self.layers[index].mixer for index in self.pools[pool]]
        heads = {m.num_heads for m in mixers if isinstance(m, AttentionConfig | MlaConfig)}
        stored = {mixer.group((), self.dtype) for mixer in mixers}
        assert len(heads) <= 1 == len(stored), "layers of one pool store and read the same"
        return mixers[0]

    def cache_spec(
        self, page_size: int, dtype: DTypeName, kv_dtype: KvDTypeName | None = None
    ) -> CacheSpec:
        """Describe what the layers store per position.

        Args:
            page_size: positions per page.
            dtype: the dtype of activations.
            kv_dtype: the dtype that K, V and latents are stored in; None for `dtype`.
        """
        groups = (self.mixer_of(pool).group(layers, dtype) for pool, layers in self.pools.items())
        if kv_dtype is not None and kv_dtype != dtype:
            groups = (
                group
                if group.kind is LayerKind.RECURRENT
                else replace(group, dtype_bytes=KV_DTYPE_BYTES[kv_dtype], kv_dtype=kv_dtype)
                for group in groups
            )
        return CacheSpec(tuple(groups), page_size)
