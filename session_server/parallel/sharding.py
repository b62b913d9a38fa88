"""Decide what each rank holds of a model: Megatron's cut (Shoeybi et al. 2019).

Heads, the inner elements of feed-forwards and channels are cut into equal consecutive parts, one
for each rank. What follows the cut projection adds up: output projections have a part of their
inputs, and the sum over ranks is the layer's output. The embedding and the LM head are cut by
rows of the vocabulary. Norms, routers and the projections to latents are whole on every rank.

Recurrent layers are cut where groups of heads stay whole: a short convolution by channels, the
gated delta rule by key heads, Mamba2 by groups, whose heads share a norm and the B and C
projections. Where these do not divide, as in Granite 4 with its one group, every rank computes the
whole layer: the sum over ranks would then need the norm's statistics in the middle of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from session_server.models.config import (
    AttentionConfig,
    ExpertLayout,
    GatedDeltaConfig,
    LayerConfig,
    Mamba2Config,
    MixerConfig,
    MlaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    ShortConvConfig,
)

_SUMMED_BIASES = ("out_proj.bias", "o_proj.bias", "down_proj.bias", "w2.bias", "down_proj_bias")
"""Ends of the names of biases that are added behind a sum over ranks."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Name a part of a model: that of `rank`, of `size` ranks."""

    rank: int
    size: int


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return what each of `size` ranks holds; it is of the same shape on all of them.

    Raises:
        ValueError: heads or feed-forwards do not divide.
    """
    layers = {layer: _layer(layer, size) for layer in config.layers}
    return replace(config, layers=tuple(layers[layer] for layer in config.layers))


def fused_parts(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the proportions of what is fused in the dimension of a tensor that ranks cut.

    `config`: of the whole model. Every part is cut by itself: a rank has its share of each.
    """
    layer = _layer_of(config, name)
    match layer.mixer:
        case ShortConvConfig() if ".conv.in_proj." in name:
            return (1, 1, 1)
        case Mamba2Config() as mamba if ".mamba.in_proj." in name or ".mamba.conv1d." in name:
            inner, written = mamba.inner_size, mamba.n_groups * mamba.state_size
            convolved = (inner, written, written)
            return convolved if ".conv1d." in name else (inner, *convolved, mamba.num_heads)
        case GatedDeltaConfig() as delta if "in_proj_qkv." in name or ".conv1d." in name:
            return (delta.keys_size, delta.keys_size, delta.values_size)
    if name.endswith("input_linear.weight"):
        return (1, 1)
    is_interleaved = isinstance(layer.ffn, MoeConfig) and layer.ffn.layout is ExpertLayout.GPT_OSS
    return (1, 1) if name.endswith("gate_up_proj") and not is_interleaved else (1,)


def is_summed_bias(config: ModelConfig, part: ModelConfig, name: str) -> bool:
    """Return whether a bias is added behind a sum over ranks, so that one of them alone has it.

    `part`: what `shard_config` made of `config`.
    """
    ends = (*_SUMMED_BIASES, f"{config.spelling.attention_output}.bias", "output_linear.bias")
    if not name.endswith(ends):
        return False
    whole, own = _layer_of(config, name), _layer_of(part, name)
    is_mixer = any(each in name for each in (".self_attn.", ".conv.", ".mamba.", ".linear_attn."))
    return whole.mixer != own.mixer if is_mixer else whole.ffn != own.ffn


def _layer_of(config: ModelConfig, name: str) -> LayerConfig:
    """Return the layer that a tensor belongs to, by its name `model.layers.N. ...`."""
    return config.layers[int(name.split(".")[2])]


def _layer(layer: LayerConfig, size: int) -> LayerConfig:
    ffn = layer.ffn
    shared = None
    if isinstance(ffn, MoeConfig):
        if ffn.shared_expert is not None:
            shared = _mlp(ffn.shared_expert, size, "shared expert")
        cut = replace(ffn, expert=_mlp(ffn.expert, size, "expert"), shared_expert=shared)
        return replace(layer, mixer=_mixer(layer.mixer, size), ffn=cut)
    return replace(layer, mixer=_mixer(layer.mixer, size), ffn=_mlp(ffn, size, "feed-forward"))


def _mlp(mlp: MlpConfig, size: int, what: str) -> MlpConfig:
    inner = _divide(mlp.intermediate_size, size, f"elements of a {what}")
    return replace(mlp, intermediate_size=inner)


def _mixer(mixer: MixerConfig, size: int) -> MixerConfig:
    match mixer:
        case AttentionConfig():
            heads = _divide(mixer.num_heads, size, "attention heads")
            # As vLLM does: ranks that outnumber the KV heads hold copies.
            if size % mixer.num_kv_heads == 0:
                return replace(mixer, num_heads=heads, num_kv_heads=1)
            kv_heads = _divide(mixer.num_kv_heads, size, "KV heads")
            return replace(mixer, num_heads=heads, num_kv_heads=kv_heads)
        case MlaConfig():
            return replace(mixer, num_heads=_divide(mixer.num_heads, size, "attention heads"))
        case ShortConvConfig() if mixer.channels % size == 0:
            return replace(mixer, channels=mixer.channels // size)
        case Mamba2Config() if mixer.n_groups % size == 0 and mixer.num_heads % size == 0:
            heads, groups = mixer.num_heads // size, mixer.n_groups // size
            return replace(mixer, num_heads=heads, n_groups=groups)
        case GatedDeltaConfig() if mixer.linear_num_key_heads % size == 0:
            return replace(
                mixer,
                linear_num_key_heads=mixer.linear_num_key_heads // size,
                linear_num_value_heads=mixer.linear_num_value_heads // size,
            )
    return mixer


def _divide(count: int, size: int, what: str) -> int:
    if count % size != 0:
        raise ValueError(f"--tensor-parallel-size {size}: {count} {what} cannot be split in {size}")
    return count // size
